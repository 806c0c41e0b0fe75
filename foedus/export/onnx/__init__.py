"""Parts of models as nodes of an ONNX graph."""
