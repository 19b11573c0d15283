from unisono.testing import Conformance


class TestZmq(Conformance):
    backend = "zmq"
