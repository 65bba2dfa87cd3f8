"""A page that shows what was tried, what won and why: needs the extra ``report``."""
