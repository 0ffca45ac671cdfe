"""GGUF files: what llama.cpp's converter makes of the reference's models."""

import dataclasses

import jax
import logits
import numpy as np
import pytest

from tunix_reverb import errors
from tunix_reverb.models import checkpoint
from tunix_reverb.models import gguf_file
from tunix_reverb.networks.transformer import presets
from tunix_reverb.networks.transformer import rope
from tunix_reverb.text import huggingface

gguf = pytest.importorskip('gguf', reason='gguf is missing')

_KEY = jax.random.PRNGKey(0)
# Of the reference's models; GGUF's names of their tensors.
_FAMILIES = {
  'llama': 'llama',
  'llama_grouped_tied_scaled': 'llama',
  'qwen2': 'qwen2',
  'qwen3': 'qwen3',
}
_NAMES = {
  'embed_tokens': 'token_embd',
  'lm_head': 'output',
  'model.norm': 'output_norm',
  'input_layernorm': 'attn_norm',
  'post_attention_layernorm': 'ffn_norm',
  'q_proj': 'attn_q',
  'k_proj': 'attn_k',
  'v_proj': 'attn_v',
  'o_proj': 'attn_output',
  'q_norm': 'attn_q_norm',
  'k_norm': 'attn_k_norm',
  'gate_proj': 'ffn_gate',
  'up_proj': 'ffn_up',
  'down_proj': 'ffn_down',
}


def _permute(tensor, heads):
  """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
  size = tensor.shape[0] // heads
  return (
    tensor.reshape(heads, 2, size // 2, *tensor.shape[1:])
    .swapaxes(1, 2)
    .reshape(tensor.shape)
  )


def _write(path, name, quantised=False):
  """The model `name` of the reference as a GGUF file."""
  model = checkpoint.open_checkpoint(str(logits.DATA / name))
  config, family = model.config, _FAMILIES[name]
  writer = gguf.GGUFWriter(path, family)
  writer.add_block_count(config.num_layers)
  writer.add_embedding_length(config.model_size)
  writer.add_feed_forward_length(config.mlp_size)
  writer.add_head_count(config.num_heads)
  writer.add_head_count_kv(config.num_kv_heads)
  writer.add_key_length(config.head_size)
  writer.add_rope_freq_base(config.rope_theta)
  writer.add_layer_norm_rms_eps(config.norm_epsilon)
  for tensor_name in model.source.names():
    shape = model.source.shape(tensor_name)
    tensor = model.source.read(tensor_name, tuple(slice(0, n) for n in shape))
    _add(writer, family, config, tensor_name, np.float32(tensor), quantised)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return str(path)


def _add(writer, family, config, name, tensor, quantised):
  stem, _, kind = name.rpartition('.')
  prefix = f'blk.{name.split(".")[2]}.' if 'layers' in name else ''
  own = next(v for k, v in _NAMES.items() if stem.endswith(k))
  if family == 'llama' and own in ('attn_q', 'attn_k'):
    heads = config.num_heads if own == 'attn_q' else config.num_kv_heads
    tensor = _permute(tensor, heads)
  block = gguf.GGMLQuantizationType.Q8_0
  if quantised and tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
    packed = gguf.quants.quantize(tensor, block)
    writer.add_tensor(f'{prefix}{own}.{kind}', packed, raw_dtype=block)
  else:
    writer.add_tensor(f'{prefix}{own}.{kind}', tensor)


@pytest.mark.parametrize('name', ['llama', 'qwen2', 'qwen3'])
def test_log_probs_equal_the_reference(name, tmp_path):
  tokens, expected = logits.expected(name)
  model = checkpoint.open_checkpoint(_write(tmp_path / 'a.gguf', name))
  mesh = logits.make_mesh(fsdp=2, tensor=2)
  params = model.load(mesh, key=_KEY)
  got = logits.log_probs(model.config, mesh, params, tokens)
  np.testing.assert_allclose(got, expected, atol=2e-5)


def test_quantised_params_are_close(tmp_path):
  exact = checkpoint.open_checkpoint(str(logits.DATA / 'llama'))
  model = checkpoint.open_checkpoint(
    _write(tmp_path / 'a.gguf', 'llama', quantised=True)
  )
  mesh = logits.make_mesh(tensor=4)
  wanted, params = exact.load(mesh, key=_KEY), model.load(mesh, key=_KEY)
  difference = np.abs(wanted['layers']['query'] - params['layers']['query'])
  # Q8_0 has 127 levels of each sign for the largest of 32 numbers.
  assert 0 < difference.max() < 2 / 254


def test_llama_3_scaling_is_told_from_its_factors(tmp_path):
  scaled = presets.get('llama3.2-1b')
  plain = dataclasses.replace(scaled, rope_scaling=None)
  factors = rope.frequencies(plain) / rope.frequencies(scaled)
  assert gguf_file.with_scaling(plain, factors, 'a') == scaled
  with pytest.raises(errors.UserError, match=r'not Llama 3\.1'):
    gguf_file.with_scaling(plain, factors**2, 'a')


@pytest.mark.parametrize('content', [b'', b'GGUF', b'nonsense' * 100])
def test_a_file_that_is_none_is_refused(content, tmp_path):
  path = tmp_path / 'a.gguf'
  path.write_bytes(content)
  with pytest.raises(errors.UserError, match='not a readable GGUF file'):
    checkpoint.open_checkpoint(str(path))


def test_another_family_is_refused(tmp_path):
  writer = gguf.GGUFWriter(tmp_path / 'a.gguf', 'mamba')
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  with pytest.raises(errors.UserError, match=r"'mamba'\) must be"):
    checkpoint.open_checkpoint(str(tmp_path / 'a.gguf'))


def _write_vocabulary(path, model='gpt2', pre='smollm'):
  """A GGUF file with a tokeniser: bytes, one merge, two control tokens."""
  tokenizers = pytest.importorskip('tokenizers', reason='tokenizers is missing')
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  words = ['<|im_start|>', '<|im_end|>', *alphabet, 'he']
  writer = gguf.GGUFWriter(path, 'llama')
  writer.add_tokenizer_model(model)
  writer.add_tokenizer_pre(pre)
  writer.add_token_list(words)
  writer.add_token_types([3, 3] + [1] * (len(words) - 2))
  writer.add_token_merges(['h e'])
  writer.add_eos_token_id(1)
  writer.add_chat_template(
    "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}"
    "<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' }}"
  )
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.close()
  return str(path)


def test_the_vocabulary_of_a_file_is_a_tokeniser(tmp_path):
  path = _write_vocabulary(tmp_path / 'a.gguf')
  chat = huggingface.open_format(path)
  tokens = chat.first([{'role': 'user', 'content': 'hehe é 12'}], [])
  assert tokens[0] == 0 and 1 in tokens and chat.stop_tokens == (1,)
  assert chat.tokeniser.decode(tokens) == (
    '<|im_start|>user\nhehe é 12<|im_end|>\n<|im_start|>assistant\n'
  )
  assert len(chat.tokeniser.encode('hehe')) == 2
  (tmp_path / 'b').mkdir()
  huggingface.save_files(path, tmp_path / 'b')
  saved = huggingface.open_format(str(tmp_path / 'b'))
  assert saved.tokeniser.encode('hehe é 12') == chat.tokeniser.encode(
    'hehe é 12'
  )
  assert saved.stop_tokens == chat.stop_tokens


@pytest.mark.parametrize(
  ('changes', 'words'),
  [
    ({'model': 'llama'}, "tokenizer.ggml.model .'llama'. must be gpt2"),
    ({'pre': 'tekken'}, "tokenizer.ggml.pre .'tekken'. must be one of"),
  ],
)
def test_another_vocabulary_is_refused(changes, words, tmp_path):
  path = _write_vocabulary(tmp_path / 'a.gguf', **changes)
  with pytest.raises(errors.UserError, match=words):
    huggingface.open_format(path)
