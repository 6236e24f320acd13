"""Grafana's dashboards as code: `python -m andon_grafana` writes docker/grafana/dashboards.

Theory of operation. A row of a dashboard is a question that somebody on call has, and is data:
panels, each with its queries and a description that says what to do. The modules are rows: of all
runs (`runs`), of one run (`running`, `stopped`, `waiting`, `costs`, `sessions`, `scraping`), of one
worker (`phases`, `machine`), and of the network (`exchange`, `reducers`, `transfers`). `boards`
puts the rows together, `panels` draws them with Grafana's own builders, and `queries` reads what
was written, for tests that ask a real Prometheus.

Two rules hold for every query. It is of one run (`$run`), because one Prometheus scrapes many, or
by run (`$runs`) in the dashboard of all. And it aggregates by exactly the labels that its legend
shows: a worker or service that comes back on another port has another `instance`, and would
otherwise be in the legend twice.

A panel is in one dashboard: the others link to it, with what is selected.
"""
