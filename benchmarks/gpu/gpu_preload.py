"""Everything heavy that jobs import, loaded once before they are forked; touches no device."""

import torch
import transformers.models.llama.modeling_llama

import radixserve.api.runtime
import radixserve.models.gpu_decoder
import radixserve.models.sizes
import radixserve.runner.cuda_runner

LOADED = (torch, transformers, radixserve)
