"""``python -m rakv_cluster.cli`` is ``rakv``."""

from rakv_cluster.cli.main import app

app()
