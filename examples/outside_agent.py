"""An agent of its own that trains: OpenAI's client, pointed at our endpoint.

  python -m examples.outside_agent --url=http://127.0.0.1:8080 --episodes=100

asks the policy sums and pays for the right number in the answer. Nothing of it
knows what it speaks to but the header that names the episode and the one call
that posts the reward. It ends after its episodes, or when the endpoint does.
"""

from __future__ import annotations

import argparse
import random
import uuid

import httpx
import openai


def play(client: openai.OpenAI, url: str, generator: random.Random) -> float:
  """One episode of two turns; returns its reward."""
  episode = uuid.uuid4().hex
  ask = lambda messages: client.chat.completions.create(
    model='policy',
    messages=messages,
    max_tokens=24,
    extra_headers={'X-Episode-Id': episode},
  )
  a, b = generator.randrange(10), generator.randrange(10)
  messages = [{'role': 'user', 'content': f'What is {a} + {b}?'}]
  answer = ask(messages).choices[0].message
  messages += [
    {'role': 'assistant', 'content': answer.content},
    {'role': 'user', 'content': 'Say the number alone.'},
  ]
  answer = ask(messages).choices[0].message
  reward = float(str(a + b) in (answer.content or '').split())
  httpx.post(
    f'{url}/v1/episodes/{episode}/reward', json={'reward': reward}, timeout=60
  ).raise_for_status()
  return reward


def main(url: str, episodes: int, seed: int = 0) -> int:
  """Plays until the endpoint ends; returns how many episodes there were."""
  generator = random.Random(seed)
  client = openai.OpenAI(
    base_url=f'{url}/v1', api_key='none', max_retries=0, timeout=600
  )
  with client:
    for played in range(episodes):
      try:
        reward = play(client, url, generator)
      # It is gone, or says that it is going.
      except (
        openai.APIConnectionError,
        openai.InternalServerError,
        httpx.HTTPError,
      ):
        return played
      print(f'episode {played}: reward {reward:g}', flush=True)
  return episodes


if __name__ == '__main__':
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--url', default='http://127.0.0.1:8080')
  parser.add_argument('--episodes', type=int, default=100)
  arguments = parser.parse_args()
  main(arguments.url, arguments.episodes)
