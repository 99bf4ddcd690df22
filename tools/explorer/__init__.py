"""What the schedule explorer's page computes, and how its site is put together.

    the page's controls --> request.py --> answer.py --> words.py, marked.py --> the page
    npm's pyodide, this folder, packages/pipeline --> build.py --> site/explorer/

Everything but ``build.py`` runs in the reader's browser too, where sixfold.pipeline is the package's own files:
so nothing here needs more than Python and that package, and nothing here knows a schedule, a time or a proof itself.
"""
