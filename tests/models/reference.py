"""Tiny models of `transformers` and what they say, for the tests beside.

  python tests/models/reference.py write      # Makes data/ anew.
  python tests/models/reference.py compare    # Checks data/, and what we save.

runs in an environment of its own with torch and transformers, which neither
lane has. data/ was written with torch 2.13.0 (CPU) and transformers 5.24.0.
Each model has a directory: config.json and model.safetensors as
`save_pretrained` writes them, and expected.npz with

  tokens: i32 [2, 24], two sequences.
  logits: f32 [2, 24, V], by eager attention in float32.

`compare --saved DIRECTORY` loads a directory that we have saved, with its
tokeniser if it has one, and prints the logits' largest difference from those of
its expected.npz.
"""

import argparse
import pathlib
import sys

import numpy as np
import torch
import transformers

_DATA = pathlib.Path(__file__).parent / 'data'
_SIZES = {
  'vocab_size': 72,
  'hidden_size': 32,
  'intermediate_size': 40,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'max_position_embeddings': 256,
  'bos_token_id': 1,
  'eos_token_id': 2,
}
_LLAMA3_ROPE = {
  'rope_type': 'llama3',
  'rope_theta': 10_000.0,
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  # So short that 24 positions tell scaled wavelengths from plain ones.
  'original_max_position_embeddings': 16,
}
# Name -> (family, what differs from _SIZES, dtype on disk, params of a file).
_MODELS = {
  'llama': ('llama', {'num_key_value_heads': 4}, torch.float32),
  'llama_grouped_tied_scaled': (
    'llama',
    {
      'num_key_value_heads': 2,
      'tie_word_embeddings': True,
      'rope_parameters': _LLAMA3_ROPE,
    },
    torch.bfloat16,
  ),
  'qwen2': (
    'qwen2',
    {'num_key_value_heads': 2, 'tie_word_embeddings': False},
    torch.float32,
  ),
  'qwen3': (
    'qwen3',
    # Heads larger than the model's size asks for, as Qwen3's are.
    {'num_key_value_heads': 2, 'head_dim': 12, 'tie_word_embeddings': True},
    torch.float16,
  ),
}
# Written in several files with an index.
_SHARDED = 'qwen2'


def _logits(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
  with torch.no_grad():
    return model(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()


def _load(path: pathlib.Path) -> torch.nn.Module:
  return transformers.AutoModelForCausalLM.from_pretrained(
    path, dtype=torch.float32, attn_implementation='eager'
  ).eval()


def write() -> None:
  """Makes every model of random params and writes what it says."""
  for seed, (name, (family, options, dtype)) in enumerate(_MODELS.items()):
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **{**_SIZES, **options})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # Of sizes at which every param matters.
      for param_name, param in model.named_parameters():
        mean = 1.0 if param_name.endswith('norm.weight') else 0.0
        torch.nn.init.normal_(param, mean, 0.3)
    path = _DATA / name
    model.to(dtype).save_pretrained(
      path, max_shard_size='20KB' if name == _SHARDED else '1GB'
    )
    for extra in path.glob('generation_config.json'):
      extra.unlink()
    tokens = np.random.default_rng(seed).integers(
      0, _SIZES['vocab_size'], (2, 24), np.int32
    )
    np.savez_compressed(
      path / 'expected.npz', tokens=tokens, logits=_logits(_load(path), tokens)
    )


def difference(path: pathlib.Path) -> float:
  """The largest difference of a directory's logits from its expected.npz."""
  with np.load(path / 'expected.npz') as expected:
    return float(
      np.abs(
        _logits(_load(path), expected['tokens']) - expected['logits']
      ).max()
    )


def compare(saved: list[pathlib.Path]) -> bool:
  """Prints a line for each directory; returns whether all agree."""
  agree = True
  for path in [_DATA / name for name in _MODELS] + saved:
    largest = difference(path)
    agree &= largest < 1e-3
    print(f'{path.name}: largest difference of a logit {largest:.2g}')
    if (path / 'tokenizer.json').exists():
      tokeniser = transformers.AutoTokenizer.from_pretrained(path)
      text = tokeniser.apply_chat_template(
        [{'role': 'user', 'content': 'Hi'}],
        tokenize=False,
        add_generation_prompt=True,
      )
      print(f'{path.name}: chat template gives {text!r}')
  return agree


def main() -> None:
  """Entry point."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('command', choices=['write', 'compare'])
  parser.add_argument('--saved', type=pathlib.Path, nargs='*', default=[])
  arguments = parser.parse_args()
  if arguments.command == 'write':
    write()
  elif not compare(arguments.saved):
    sys.exit('models differ')


if __name__ == '__main__':
  main()
