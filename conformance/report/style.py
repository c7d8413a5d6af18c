"""The style sheet of the HTML page."""

STYLE = """
:root { --ink:#1c2530; --soft:#5b6672; --line:#d9dee3; --back:#ffffff; --tint:#f5f7f9;
  --passed:#1a7f4b; --failed:#c1272d; --error:#8a2be2; --not_applicable:#8b949e; }
* { box-sizing:border-box }
body { margin:0 auto; padding:2rem 1.5rem 4rem; max-width:62rem; background:var(--back); color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif }
h1 { font-size:1.6rem; margin:0 0 .3rem } h2 { font-size:1.2rem; margin:2.4rem 0 .6rem }
h3 { font-size:1rem; margin:1.4rem 0 .3rem }
p { margin:.4rem 0 } .soft { color:var(--soft) }
code, pre, .mono { font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;
  font-size:.88em }
pre { background:var(--tint); border-left:3px solid var(--line); padding:.6rem .8rem; margin:.4rem 0; overflow-x:auto;
  white-space:pre-wrap; overflow-wrap:anywhere }
.verdict { display:inline-block; padding:.1rem .7rem; border-radius:1rem; color:#fff; font-weight:600;
  background:var(--not_applicable) }
.verdict.passed { background:var(--passed) } .verdict.failed { background:var(--failed) }
.levels { display:grid; grid-template-columns:repeat(auto-fit,minmax(9rem,1fr)); gap:.6rem; margin:1rem 0 }
.level { border:1px solid var(--line); border-top:4px solid var(--line); border-radius:4px; padding:.5rem .7rem }
.level b { display:block } .level .count { font-size:.85em; color:var(--soft) }
.level.passed { border-top-color:var(--passed) } .level.failed { border-top-color:var(--failed) }
.level.error { border-top-color:var(--error) }
.sign { font-weight:700 } .passed .sign, .sign.passed { color:var(--passed) }
.failed .sign, .sign.failed { color:var(--failed) } .error .sign, .sign.error { color:var(--error) }
.not_applicable .sign, .sign.not_applicable { color:var(--not_applicable) }
.failure { border-left:4px solid var(--failed); padding:.1rem 0 .1rem 1rem; margin:1.1rem 0 }
.failure h3 { margin-top:.2rem }
.failure.error { border-color:var(--error) }
table { border-collapse:collapse; width:100%; font-size:.88rem } caption { text-align:left; color:var(--soft) }
th, td { text-align:left; padding:.22rem .5rem; border-bottom:1px solid var(--line); vertical-align:top }
thead th { position:sticky; top:0; background:var(--back); border-bottom:2px solid var(--line) }
tbody th { font-weight:400 } tr.bad th { font-weight:600; color:var(--failed) }
td.cell { white-space:nowrap } td.many { white-space:normal; min-width:11rem }
td.many > span { display:inline-block; margin-right:.7em; white-space:nowrap }
.facts { width:auto } .facts th { color:var(--soft); font-weight:400; padding-left:0 }
.figure { width:100%; height:auto; display:block; margin:.5rem 0 }
.figure text { font:11px system-ui,"DejaVu Sans",sans-serif; fill:var(--soft) } .figure text.fail { fill:var(--failed) }
.figure .weak { stroke:var(--line); stroke-width:1 } .figure .strong { stroke:var(--ink); stroke-width:1.2 }
.figure .over { fill:var(--failed); opacity:.07 }
.legend span { display:inline-block; margin-right:1.2em } .swatch { width:.9em; height:.9em; margin:0 .35em -.1em 0;
  display:inline-block; border:1px solid var(--line) }
@media print { thead th { position:static } }
"""
