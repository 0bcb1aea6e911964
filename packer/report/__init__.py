"""Reports for people: one self-contained HTML page for a prune plan and for a verification, with plots.

``page`` knows HTML and no plots, ``plots`` and ``svg`` know matplotlib and no HTML; ``prune_figures`` and
``verify_figures`` compute what ``prune_page`` and ``verify_page`` tell.
"""
