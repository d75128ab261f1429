"""Who holds what: from datasets, shifts and settings to a `Federation`.

`federation` is what all else reads. `arrays` makes one from your own data and `build` from a
study's `[data]` table; `datasets`, `tables`, `folders` and `leaf` find the samples, `plan` and
`shifts` say what each client receives, and each client fills and scales its inputs by its own rows
(`preparation`).
"""
