"""Builds the `tunix_reverb` wheel: the library and its `launch` binaries."""

import pathlib
import re

import setuptools

_ROOT = pathlib.Path(__file__).parent


def _version() -> str:
  """Returns `tunix_reverb.__version__` without importing the package."""
  text = (_ROOT / 'tunix_reverb' / '__init__.py').read_text(encoding='utf-8')
  match = re.search(r"^__version__ = '([^']+)'$", text, re.MULTILINE)
  if match is None:
    raise ValueError("tunix_reverb/__init__.py must hold __version__ = '...'")
  return match.group(1)


def _readme() -> str:
  path = _ROOT / 'README.md'
  return path.read_text(encoding='utf-8') if path.exists() else ''


# The core names no TensorFlow and no upper bounds: `requirements/` pins what is
# tested, and a process with a newer JAX must be able to import the rest.
_CORE = [
  'absl-py',
  'chex>=0.1.90',
  'cramjam>=2.8',
  'dm-env>=1.6',
  'dm-tree>=0.1.8',
  'flax>=0.10.4',
  'grpcio>=1.62',
  'jax>=0.4.34',
  'ml-dtypes>=0.3.1',
  'numpy>=1.26',
  'optax>=0.2.5',
  'orbax-checkpoint>=0.11.5',
  'protobuf>=4.21',
  'rich',
  'tensorboardX',
]

_ENVIRONMENTS = {
  'bsuite': ['bsuite>=0.3.6'],
  'gym': ['gymnasium>=1.4'],
  'atari': ['ale-py>=0.12', 'gymnasium>=1.4', 'opencv-python-headless'],
  # dm-control 1.0.50 does not work with mujoco 4.
  'dm_control': ['dm-control>=1.0.50', 'mujoco<4'],
  'envpool': ['envpool>=1.2.5'],
}

# Turn environments with tools, language models and their tokenisers.
_AGENTS = [
  'gguf>=0.17',
  'httpx',
  'jinja2',
  'mcp>=2.3',
  'pydantic-monty>=1.4',
  'reasoning-gym>=0.1.19',
  'safetensors>=0.4.3',
  'starlette',
  'tokenizers>=0.20',
  'uvicorn',
]

_EXTRAS = {
  # The Reverb lane, where the replay server lives; every role may.
  # The last wheel of dm-reverb: x86-64 Linux, Python 3.9-3.11, built against
  # the C++ interface of TensorFlow 2.15 and of no other.
  'reverb': ['dm-reverb==0.14.0', 'tensorflow-cpu>=2.15.1,<2.16'],
  # The modern lane: every role but the replay server, on current JAX.
  'modern': ['flax>=0.12', 'jax>=0.10', 'numpy>=2', 'protobuf>=5'],
  # The TPU's compiler, for `launch.plan --compiler=tpu`; modern lane only.
  'tpu-plan': ['jax[tpu]>=0.10'],
  **_ENVIRONMENTS,
  'environments': sorted(
    {package for packages in _ENVIRONMENTS.values() for package in packages}
  ),
  'agents': _AGENTS,
  'dev': [
    'distrax',
    'grpcio-tools',
    'hypothesis',
    'import-linter',
    'mypy',
    'openai',
    'psutil',
    'pytest>=9',
    'pytest-timeout',
    'pytest-xdist',
    'rlax',
    'ruff',
  ],
}

setuptools.setup(
  name='tunix_reverb',
  version=_version(),
  description=(
    'Decoupled reinforcement learning on JAX: asynchronous dm_env actors, '
    'a DeepMind Reverb server, and a continuous V-trace learner.'
  ),
  long_description=_readme(),
  long_description_content_type='text/markdown',
  license='Apache-2.0',
  license_files=['LICENSE'],
  packages=setuptools.find_packages(
    include=['tunix_reverb', 'tunix_reverb.*', 'launch', 'launch.*']
  ),
  package_data={
    'tunix_reverb': ['py.typed'],
    'tunix_reverb.replay.wire_client': ['*.binpb', '*.proto'],
  },
  python_requires='>=3.11',
  install_requires=_CORE,
  extras_require=_EXTRAS,
)
