"""Protobuf messages for TensorBoard's event files.

The messages contain scalars, histograms, texts, the layout of the CUSTOM SCALARS tab and the
content of the HPARAMS tab. `torch.utils.tensorboard` makes the same messages, but imports torch.
"""

# pyright: reportAttributeAccessIssue=false
# Protobuf creates the classes of messages at import, so pyright does not know their attributes.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tensorboard.compat.proto import summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
from tensorboard.plugins.text.plugin_data_pb2 import TextPluginData

Charts = Mapping[str, Sequence[str]]  # title -> tags that share the chart

# TensorBoard uses these tags to assign messages to its tabs.
LAYOUT_TAG = "custom_scalars__config__"
HPARAMS_TAG = "_hparams_"


def scalar(tag: str, value: float) -> Any:
    """Return the message for a scalar."""
    return summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag=tag, simple_value=value)])


def histogram(tag: str, values: np.ndarray, bins: int) -> Any:
    """Return the message for a histogram of values (N,), N > 0, in equal bins from min to max."""
    counts, edges = np.histogram(values, bins=bins)
    filled = np.flatnonzero(counts)
    # If all values are equal, numpy adds empty bins on both sides.
    first, last = filled[0], filled[-1]
    return binned(
        tag,
        edges[first : last + 2],
        counts[first : last + 1],
        least=float(values.min()),
        greatest=float(values.max()),
        total=float(values.sum()),
        squares=float(values.dot(values)),
    )


def binned(
    tag: str,
    edges: np.ndarray,
    counts: np.ndarray,
    *,
    least: float,
    greatest: float,
    total: float,
    squares: float,
) -> Any:
    """Return the message for a histogram with counts (B,) between edges (B + 1,).

    TensorBoard identifies a bin by its upper edge. So the message begins with an extra, empty bin,
    whose upper edge is the lower edge of the first bin in `counts`.

    Args:
        tag: The tag.
        edges: The edges of the bins.
        counts: Number of values in each bin.
        least: The smallest value.
        greatest: The largest value.
        total: Sum of the values.
        squares: Sum of the squared values.
    """
    histo = summary_pb2.HistogramProto(
        min=least,
        max=greatest,
        num=int(counts.sum()),
        sum=total,
        sum_squares=squares,
        bucket_limit=edges.tolist(),
        bucket=[0, *counts.tolist()],
    )
    return summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag=tag, histo=histo)])


def text(tag: str, markdown: str) -> Any:
    """Return the message for a text on the TEXT tab."""
    one = tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)])
    about = _for_plugin("text", TextPluginData(version=0))
    return _of_bytes(f"{tag}/text_summary", markdown.encode(), one, about)


def custom_scalars(layout: Mapping[str, Charts]) -> Any:
    """Return the message for the layout of the CUSTOM SCALARS tab: categories and their charts."""
    categories = [
        layout_pb2.Category(
            title=category,
            chart=[
                layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=tags))
                for title, tags in charts.items()
            ],
        )
        for category, charts in layout.items()
    ]
    content = layout_pb2.Layout(category=categories).SerializeToString()
    no_axes = tensor_shape_pb2.TensorShapeProto()
    return _of_bytes(LAYOUT_TAG, content, no_axes, _for_plugin("custom_scalars"))


def hparams(searched: Mapping[str, bool | int | float | str], metrics: Sequence[str]) -> list[Any]:
    """Return the messages for the HPARAMS tab.

    Args:
        searched: Searched parameters and their values.
        metrics: Tags of the metrics to show beside the parameters.
    """
    infos = [
        api_pb2.HParamInfo(name=name, type=_hparam_type(value)) for name, value in searched.items()
    ]
    shown = [api_pb2.MetricInfo(name=api_pb2.MetricName(tag=metric)) for metric in metrics]
    start = plugin_data_pb2.SessionStartInfo()
    for name, value in searched.items():
        field = "string_value" if isinstance(value, str) else "number_value"
        setattr(start.hparams[name], field, value)
    end = plugin_data_pb2.SessionEndInfo(status=api_pb2.STATUS_SUCCESS)
    experiment = api_pb2.Experiment(hparam_infos=infos, metric_infos=shown)
    return [
        _hparams_part("experiment", experiment=experiment),
        _hparams_part("session_start_info", session_start_info=start),
        _hparams_part("session_end_info", session_end_info=end),
    ]


def _hparam_type(value: bool | int | float | str) -> int:
    return api_pb2.DATA_TYPE_STRING if isinstance(value, str) else api_pb2.DATA_TYPE_FLOAT64


def _hparams_part(name: str, **content: Any) -> Any:
    about = _for_plugin("hparams", plugin_data_pb2.HParamsPluginData(version=0, **content))
    value = summary_pb2.Summary.Value(tag=f"{HPARAMS_TAG}/{name}", metadata=about)
    return summary_pb2.Summary(value=[value])


def _of_bytes(tag: str, content: bytes, shape: Any, about: Any) -> Any:
    tensor = tensor_pb2.TensorProto(
        dtype=types_pb2.DT_STRING, string_val=[content], tensor_shape=shape
    )
    value = summary_pb2.Summary.Value(tag=tag, metadata=about, tensor=tensor)
    return summary_pb2.Summary(value=[value])


def _for_plugin(name: str, content: Any = None) -> Any:
    """Return metadata that assigns a value to one of TensorBoard's tabs."""
    data = summary_pb2.SummaryMetadata.PluginData(
        plugin_name=name, content=b"" if content is None else content.SerializeToString()
    )
    return summary_pb2.SummaryMetadata(plugin_data=data)
