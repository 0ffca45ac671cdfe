"""The tokens of models from scratch."""

import numpy as np
import pytest

from tunix_reverb.text import characters

_FORMAT = characters.CharacterFormat()
_TOKENISER = _FORMAT.tokeniser
_END, _CALL = characters.END, characters.CALL


def test_the_alphabet_goes_there_and_back():
  tokens = _TOKENISER.encode(characters.ALPHABET)
  assert tokens == list(range(4, 16))
  assert _TOKENISER.decode(tokens) == characters.ALPHABET
  assert _TOKENISER.vocabulary_size == 16


def test_every_token_has_a_text_of_its_own():
  text = _TOKENISER.decode(range(16))
  assert len(set(text)) == len(text) == 16


def test_a_run_of_unknown_characters_is_one_token():
  tokens = _TOKENISER.encode('no tool: 42 !')
  assert tokens == [3, *_TOKENISER.encode('42'), 3]


def test_a_look_up_is_eleven_tokens():
  first = _FORMAT.first(
    [
      {'role': 'system', 'content': 'Call the tool with the key.'},
      {'role': 'user', 'content': '47'},
    ],
    [],
  )
  call = _FORMAT.turn('!')
  result = _FORMAT.following([{'role': 'tool', 'content': '39'}], ended=True)
  answer = _FORMAT.turn('39')
  assert first == [*_TOKENISER.encode('47'), _END]
  assert call == [_CALL]
  assert result == [characters.RESULT, *_TOKENISER.encode('39'), _END]
  assert answer == [*_TOKENISER.encode('39'), _END]
  whole = first + call + result + answer
  assert _TOKENISER.decode(whole) == '47.!=39.39.'


def test_a_turn_that_did_not_end_is_ended():
  assert _FORMAT.following([], ended=False) == [_END]
  message = {'role': 'user', 'content': '1'}
  assert _FORMAT.following([message], ended=False) == [_END, 5, _END]


@pytest.mark.parametrize('text', ['', '12', '!', '1+2!'])
def test_a_scripted_turn_says_its_text(text):
  turn = _FORMAT.turn(text)
  assert turn[-1] in _FORMAT.stop_tokens
  assert not set(turn[:-1]) & set(_FORMAT.stop_tokens)
  assert _FORMAT.text(turn) == text


def test_any_tokens_have_a_text():
  generator = np.random.default_rng(0)
  for length in range(20):
    turn = generator.integers(16, size=length).tolist()
    assert isinstance(_FORMAT.text(turn), str)
