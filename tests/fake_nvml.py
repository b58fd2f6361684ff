"""Stands in for the module pynvml: two GPUs with memory and utilisation, each of which may be made to fail."""

from types import SimpleNamespace


class NVMLError(Exception):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


class FakeGpu:
    def __init__(self, number: int) -> None:
        self.number = number
        self.uuid = f"GPU-{number}"
        self.memory = SimpleNamespace(used=(number + 1) * 2**30, total=4 * 2**30)
        self.utilization = SimpleNamespace(gpu=75)
        self.memory_error: NVMLError | None = None
        self.utilization_error: NVMLError | None = None


class FakeNvml:
    """``init_error``: there is no driver."""

    NVMLError = NVMLError
    NVMLError_NotSupported = NVMLError_NotSupported

    def __init__(self, init_error: NVMLError | None = None) -> None:
        self.gpus = [FakeGpu(0), FakeGpu(1)]
        self._init_error = init_error

    def nvmlInit(self) -> None:
        if self._init_error is not None:
            raise self._init_error

    def nvmlDeviceGetHandleByIndex(self, number: int) -> FakeGpu:
        if number >= len(self.gpus):
            raise NVMLError("Invalid Argument")
        return self.gpus[number]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        found = [gpu for gpu in self.gpus if gpu.uuid == uuid]
        if not found:
            raise NVMLError("Not Found")
        return found[0]

    def nvmlDeviceGetIndex(self, gpu: FakeGpu) -> int:
        return gpu.number

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> SimpleNamespace:
        if gpu.memory_error is not None:
            raise gpu.memory_error
        return gpu.memory

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> SimpleNamespace:
        if gpu.utilization_error is not None:
            raise gpu.utilization_error
        return gpu.utilization
