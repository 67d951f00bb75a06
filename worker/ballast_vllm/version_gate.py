"""An import of this module ends the process with a sentence if Ballast does not support the installed vLLM.

It is the first import of a module that imports vLLM and that another program names, such as a scheduler class.
"""

from ballast_vllm.versions import exit_if_unsupported

exit_if_unsupported()
