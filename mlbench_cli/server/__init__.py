"""The dashboard and its REST API, on top of `mlbench_cli.api` (extra `dashboard`: Starlette and uvicorn).

`app.make_app` returns the ASGI application; `security.Guard` checks every request.
"""
