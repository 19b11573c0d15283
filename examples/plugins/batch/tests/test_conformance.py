from unisono.testing import EnvironmentConformance


class TestBatch(EnvironmentConformance):
    environment = "batch"
