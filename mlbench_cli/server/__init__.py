"""The dashboard and its REST API, on top of `mlbench_cli.api` (extra `dashboard`: Starlette and uvicorn).

`app.make_app` is the whole of it as an ASGI application; `security.Guard` stands in front of every request.
"""
