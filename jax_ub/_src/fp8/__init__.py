"""FP8: recipes, arrays with scales, quantization, and state of delayed scaling."""
