"""The architectures that are imported and exported, one file each; a new one is a file and a line here.

Of several that compute a model the first one's name is written.
"""

from sixfold.gpt.huggingface.architecture import Architecture
from sixfold.gpt.huggingface.architectures.deepseek import DEEPSEEK_V3
from sixfold.gpt.huggingface.architectures.gemma import GEMMA2, GEMMA3
from sixfold.gpt.huggingface.architectures.llama import LLAMA
from sixfold.gpt.huggingface.architectures.mistral import MISTRAL
from sixfold.gpt.huggingface.architectures.mixtral import MIXTRAL
from sixfold.gpt.huggingface.architectures.olmo import OLMO2, OLMO3
from sixfold.gpt.huggingface.architectures.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE

ARCHITECTURES: tuple[Architecture, ...] = (
    LLAMA,
    QWEN2,
    QWEN3,
    QWEN2_MOE,
    QWEN3_MOE,
    MISTRAL,
    MIXTRAL,
    OLMO2,
    OLMO3,
    GEMMA2,
    GEMMA3,
    DEEPSEEK_V3,
)
