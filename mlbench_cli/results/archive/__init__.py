"""Archives of runs. `seal` makes one of a run's folder, `verify` checks one; both ask `judge` what follows from the
`evidence`. `files` reads and packs folders and zips, `documents` are the types of what is in them."""
