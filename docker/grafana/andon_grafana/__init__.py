"""Grafana's dashboards as code: `python -m andon_grafana` writes docker/grafana/dashboards.

Theory of operation. A row of the dashboard is a question that somebody on call has, and a module
of this package: `running`, `stopped`, `waiting`, `costs`, `scraping`. A row is data: panels, each
with its queries and a description that says what to do. `panels` draws them with Grafana's own
builders, `line` puts the rows together, and `queries` reads what was written, for tests that ask a
real Prometheus.

Two rules hold for every query. It is of one run (`$run`), because one Prometheus scrapes many. And
it aggregates by exactly the labels that its legend shows: a worker or service that comes back on
another port has another `instance`, and would otherwise be in the legend twice.
"""
