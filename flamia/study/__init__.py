"""The study: recipes measured on real activations, on a laptop.

One question per module: `errors` (how far from exact attention), `leaks` (does a later token move an earlier output),
`memory` (what the backward keeps), `consistency` (is it the backward of this forward), `long_context` (does P survive
an attention sink), `dynamic_range` (do token blocks fit the data). `sample` holds the input, `run` asks all of them,
`report` and `plots` show the answers, `command` is ``flamia study``.
"""
