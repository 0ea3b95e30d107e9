"""The tests of the plugin. Run from the repository's root with the Python of a vLLM environment:

python -m unittest discover -s python/chiasm_vllm/tests -t python/chiasm_vllm
"""
