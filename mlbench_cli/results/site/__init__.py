"""A results site: static pages generated from verified archives, where readers can verify every result again.

Start at `build.build_site`. `entries` reads archives and receipts, `claims` groups repeats, `pictures` and `pages`
render them.
"""
