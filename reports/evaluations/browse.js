"use strict";
// Filter and show the generations of the page. Texts become text nodes, never markup.
(() => {
  const PER_PAGE = 20;
  const PAUSE_MS = 150; // the search starts after this pause in typing
  const { prompts, fields, rows } = JSON.parse(document.getElementById("data").textContent);
  const at = Object.fromEntries(fields.map((name, place) => [name, place]));
  const element = (id) => document.getElementById(id);
  const template = element("card");
  const searched = new Array(rows.length); // the lower-case text of a row, filled on demand
  let found = [];
  let page = 0;

  const searchable = (place) => {
    const row = rows[place];
    searched[place] ??= [prompts[row[at.prompt]].text, prompts[row[at.prompt]].truth,
      row[at.response], row[at.answer] ?? ""].join("\n").toLowerCase();
    return searched[place];
  };

  const needle = () => element("text").value.trim().toLowerCase();

  const bound = (id, otherwise) => {
    const value = element(id).valueAsNumber;
    return Number.isNaN(value) ? otherwise : value;
  };

  const wanted = () => {
    const category = element("category").value;
    const end = element("end").value;
    const text = needle();
    const least = bound("least", -Infinity);
    const most = bound("most", Infinity);
    const anyReward = least === -Infinity && most === Infinity;
    return (place) => {
      const row = rows[place];
      const reward = row[at.reward];
      return (category === "" || row[at.category] === category)
        && (end === "" || row[at.finished] === (end === "finished"))
        && (anyReward || (reward !== null && reward >= least && reward <= most))
        && (text === "" || searchable(place).includes(text));
    };
  };

  // Each returns a sort key of a row; the smallest comes first.
  const ORDERS = {
    prompt: null,
    low: (row) => row[at.reward] ?? Infinity,
    high: (row) => -(row[at.reward] ?? -Infinity),
    short: (row) => row[at.tokens],
    long: (row) => -row[at.tokens],
    unlikely: (row) => row[at.log_prob] / row[at.tokens],
  };

  const search = () => {
    found = [...rows.keys()].filter(wanted());
    const key = ORDERS[element("order").value];
    if (key !== null) {
      found.sort((a, b) => key(rows[a]) - key(rows[b]) || a - b);
    }
    page = 0;
    show();
  };

  // Fill in a text and mark the search term in it.
  const fill = (target, text) => {
    const sought = needle();
    const lower = text.toLowerCase();
    target.textContent = "";
    let from = 0;
    // If the lower-case text is longer than the text, positions in the two differ.
    if (sought.length > 1 && lower.length === text.length) {
      for (let place = lower.indexOf(sought); place >= 0; place = lower.indexOf(sought, from)) {
        const mark = document.createElement("mark");
        mark.textContent = text.slice(place, place + sought.length);
        target.append(text.slice(from, place), mark);
        from = place + sought.length;
      }
    }
    target.append(text.slice(from));
  };

  const number = (value) => String(Number(value.toPrecision(4)));

  const facts = (row) => {
    const parts = [`response ${row[at.index]}`, `${row[at.tokens]} tokens`];
    parts.push(`log-prob ${number(row[at.log_prob] / row[at.tokens])} per token`);
    if (!row[at.finished]) {
      parts.push("cut off");
    }
    if (row[at.error] !== null) {
      parts.push(`not scored: ${row[at.error]}`);
    } else {
      parts.push(`reward ${number(row[at.reward])}`, `format ${number(row[at.format])}`,
        `answer ${number(row[at.right])}`);
    }
    return parts.join(" · ");
  };

  const card = (place) => {
    const row = rows[place];
    const prompt = prompts[row[at.prompt]];
    const item = template.content.firstElementChild.cloneNode(true);
    const part = (name) => item.querySelector(`[data-part="${name}"]`);
    item.className = row[at.category] ?? "";
    part("tag").textContent = row[at.category] ?? "";
    part("which").textContent = `prompt ${prompt.index}`;
    part("facts").textContent = facts(row);
    fill(part("prompt"), prompt.text);
    fill(part("truth"), prompt.truth);
    fill(part("response"), row[at.response] || "(empty)");
    if (row[at.answer] === null) {
      part("answered").remove();
    } else {
      fill(part("answer"), row[at.answer]);
    }
    return item;
  };

  const show = () => {
    const pages = Math.max(1, Math.ceil(found.length / PER_PAGE));
    const first = page * PER_PAGE;
    const shown = found.slice(first, first + PER_PAGE);
    element("list").replaceChildren(...shown.map(card));
    element("count").textContent = found.length === 0
      ? `none of ${rows.length} responses`
      : `${first + 1} to ${first + shown.length} of ${found.length} responses`
        + (found.length < rows.length ? `, chosen from ${rows.length}` : "");
    for (const pager of document.querySelectorAll(".pager")) {
      const [back, forth] = pager.querySelectorAll("button");
      back.disabled = page === 0;
      forth.disabled = page === pages - 1;
      pager.querySelector("span").textContent = `page ${page + 1} of ${pages}`;
    }
  };

  const turn = (pages) => {
    page += pages;
    show();
    element("browse").scrollIntoView();
  };

  let pause = 0;
  element("text").addEventListener("input", () => {
    clearTimeout(pause);
    pause = setTimeout(search, PAUSE_MS);
  });
  for (const id of ["category", "end", "order", "least", "most"]) {
    element(id).addEventListener("input", search);
  }
  for (const pager of document.querySelectorAll(".pager")) {
    const [back, forth] = pager.querySelectorAll("button");
    back.addEventListener("click", () => turn(-1));
    forth.addEventListener("click", () => turn(1));
    pager.hidden = false;
  }
  element("controls").hidden = false;
  search();
})();
