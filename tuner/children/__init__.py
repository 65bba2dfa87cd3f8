"""The parent's side of the children: it starts, times out, kills and replaces them."""
