//! The form that msgspec writes: names in order, numbers and lists in their shortest encoding.

use chiasm_types::TokenId;

use super::room::reserve;
use crate::event::decode::{Input, array_len, integer, map_len, optional, skip, text};

pub(super) const NIL: u8 = 0xc0;
const U64: u8 = 0xcf;
const I64: u8 = 0xd3;

/// The number of fields of an event that have not been read yet.
pub(super) struct Fields {
    left: u32,
}

impl Fields {
    /// Reads the number of fields.
    pub(super) fn read(input: Input<'_, '_>) -> Option<Self> {
        let left = match **input {
            [marker @ 0x80..=0x8f, ref rest @ ..] => {
                *input = rest;
                u32::from(marker & 0xf)
            }
            _ => map_len(input, "event").ok()?,
        };
        Some(Self { left })
    }

    /// Consumes the name of the next field if it equals `name`, which includes the msgpack marker.
    /// Returns whether it did.
    #[inline]
    pub(super) fn take_name<const N: usize>(
        &mut self,
        input: Input<'_, '_>,
        name: &[u8; N],
    ) -> bool {
        match input.split_first_chunk::<N>() {
            Some((next, rest)) if next == name && self.left > 0 => {
                self.left -= 1;
                *input = rest;
                true
            }
            _ => false,
        }
    }

    /// Skips the fields of later versions. Returns `None` for a known field, which is out of order.
    pub(super) fn skip_rest(self, input: Input<'_, '_>, known: &[&str]) -> Option<()> {
        for _ in 0..self.left {
            if known.contains(&text(input, "event").ok()?) {
                return None;
            }
            skip(input, "event").ok()?;
        }
        Some(())
    }
}

/// Reads a list of token ids. Leaves `tokens` empty if a number is no token.
///
/// The loop has no branch that depends on the ids: a vocabulary has ids of three widths, in an
/// order that no branch predictor foresees.
pub(super) fn tokens(
    input: Input<'_, '_>,
    tokens: &mut Vec<TokenId>,
    kept_bytes: &mut usize,
) -> Option<()> {
    let length = length(input)?;
    if length > input.len() {
        return None;
    }
    reserve(tokens, length.saturating_sub(tokens.len()), kept_bytes);
    tokens.resize(length, TokenId(0));
    let bytes = *input;
    let mut at = 0;
    // Becomes 1 when a number is in a form that this loop does not read.
    let mut odd = 0;
    for token in &mut tokens[..] {
        // Only a list at the end of the payload has fewer than eight bytes left.
        let Some(window) = bytes.get(at..).and_then(<[u8]>::first_chunk::<8>) else {
            odd = 1;
            break;
        };
        // A number below 128 is its own marker. The markers of the three wider forms are cc, cd and
        // ce.
        let marker = u64::from(window[0]);
        let wide = marker >> 7;
        let length = wide << (marker & 3);
        odd |= wide & u64::from(marker.wrapping_sub(0xcc) > 2);
        at += 1 + length as usize;
        let digits = u64::from_be_bytes(*window) << (8 * wide);
        *token = TokenId((digits >> (64 - 8 * (length | (wide ^ 1)))) as u32);
    }
    if odd == 0 {
        *input = &input[at..];
        return Some(());
    }
    tokens.clear();
    let mut are_tokens = true;
    for _ in 0..length {
        match u32::try_from(integer::<u64>(input, "token_ids").ok()?) {
            Ok(token) => tokens.push(TokenId(token)),
            Err(_) => are_tokens = false,
        }
    }
    if !are_tokens {
        tokens.clear();
    }
    Some(())
}

/// Returns `true` if this marker precedes an integer of eight bytes. Signed or unsigned, they are
/// the same 64 bits of a hash.
#[inline]
pub(super) fn is_long(marker: u8) -> bool {
    (marker == U64) | (marker == I64)
}

/// Reads the length of a list.
#[inline]
pub(super) fn length(input: Input<'_, '_>) -> Option<usize> {
    let (length, rest) = match **input {
        [marker @ 0x90..=0x9f, ref rest @ ..] => (usize::from(marker & 0xf), rest),
        [0xdc, high, low, ref rest @ ..] => (usize::from(u16::from_be_bytes([high, low])), rest),
        _ => return array_len(input, "list").ok().map(|length| length as usize),
    };
    *input = rest;
    Some(length)
}

/// Reads an optional number if its field `is_present`.
pub(super) fn number<T: TryFrom<i128>>(
    is_present: bool,
    input: Input<'_, '_>,
) -> Option<Option<T>> {
    if is_present { optional(input, |input| integer(input, "number")).ok() } else { Some(None) }
}

/// Consumes a nil, if there is one. Returns whether there was.
#[inline]
pub(super) fn nil(input: Input<'_, '_>) -> bool {
    let rest = input.strip_prefix(&[NIL]);
    *input = rest.unwrap_or(input);
    rest.is_some()
}
