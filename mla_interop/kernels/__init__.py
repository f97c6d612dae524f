"""How a launch function comes to be: compiled objects, their disk cache, and the native glue around them."""
