"""A results site: static pages made of verified archives, on which readers can verify every result again.

`build.build_site` is the entry. `entries` reads archives and receipts, `claims` puts repeats together, `pictures` and
`pages` show them, `bundle` ships the judge and Python for the browser, `repository` makes a repository of results.
"""
