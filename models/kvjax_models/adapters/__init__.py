"""KV caches of kvjax under the models of other libraries; one module per library, which imports it."""
