"""The room of the conformance suite: probes of the machine model, levels and cases that compare an attention
implementation with ``flamia.reference``, byte for byte where the promise is bits, and the reports and certificates
that result. It may import ``flamia.reference`` and ``flamia.kernels``."""
