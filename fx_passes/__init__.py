"""From a site's name to an edited graph, and from a request to table rows.

Needs torch and the ops, never vLLM.
"""

if __name__ != "eyesplice.fx_passes":
    raise ImportError(f"import eyesplice.fx_passes, not {__name__}")
