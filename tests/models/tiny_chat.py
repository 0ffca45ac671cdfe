"""A tiny pretrained model that reads and writes bytes, on disk."""

import json

import jax

from tunix_reverb.models import saving
from tunix_reverb.networks.transformer import config as config_lib
from tunix_reverb.networks.transformer import params as params_lib

CHATML = """{% for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SIZES = config_lib.TransformerConfig(
  vocabulary_size=320,
  num_layers=1,
  model_size=16,
  mlp_size=16,
  num_heads=2,
  num_kv_heads=1,
  head_size=8,
  tied_embeddings=True,
  init_scale=0.3,
)


def write(directory):
  """Writes model, tokeniser and chat template; returns the path as text."""
  params = params_lib.init(SIZES, jax.random.PRNGKey(3))
  saving.save(directory, SIZES, params, dtype='float32')
  write_tokeniser(directory, CHATML)
  return str(directory)


def write_tokeniser(
  directory, template, special=('<|im_start|>', '<|im_end|>')
):
  """Bytes, a few merges, special tokens, and a chat template."""
  import tokenizers

  level = tokenizers.pre_tokenizers.ByteLevel
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.pre_tokenizer = level(add_prefix_space=False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=300,
    special_tokens=list(special),
    initial_alphabet=level.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(['hello hello assistant user user'], trainer)
  directory.mkdir(exist_ok=True)
  tokenizer.save(str(directory / 'tokenizer.json'))
  settings = {'chat_template': template, 'eos_token': '<|im_end|>'}
  (directory / 'tokenizer_config.json').write_text(json.dumps(settings))
