from unisono.testing import LauncherConformance


class TestDask(LauncherConformance):
    launcher = "dask"
