"""Small policies that act in Gymnasium environments."""
