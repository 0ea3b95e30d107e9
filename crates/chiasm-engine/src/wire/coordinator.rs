//! The messages between the engines of a group and its coordinator (`vllm/v1/engine/coordinator.py`
//! and `DPEngineCoreProc` in `vllm/v1/engine/core.py`).
//!
//! The engines of a group step together, in waves: a wave begins with a request while all are idle,
//! and ends when none has work. An engine without a request steps along, because the experts of
//! each layer are spread over all engines.
//!
//! 1. engine → coordinator: a subscription, `1` and an empty topic
//! 2. coordinator → engines: [`READY`], once all have subscribed
//! 3. engine → coordinator: a [`Report`], when a wave starts or is complete, and statistics
//! 4. coordinator → engines: [`encode_start`], to wake those that are idle

use bytes::Bytes;

use super::codec::Wire;
use super::error::WireError;
use super::output::{self, EngineMessage};
use super::reader::Reader;
use super::writer::Writer;

/// The message to all engines after which they finish their handshake.
pub const READY: &[u8] = b"READY";

/// The first frame of the message that starts a wave (`EngineCoreRequestType.START_DP_WAVE` in
/// `vllm/v1/engine/__init__.py`).
const START: &[u8] = b"\x02";

/// The first byte of a subscription; that of its end is 0.
const SUBSCRIBE: u8 = 1;

/// A wave number older than any real one.
///
/// An idle engine that gets a request of an older wave starts a wave itself. vLLM 0.33 does so for
/// every request, 0.32 only for these: after another request it would hang in its first collective
/// until the other engines are woken.
pub const STALE_WAVE: i64 = -1;

/// A message of an engine to its coordinator that changes the state of waves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    /// The engine has started this wave, and the others have to be woken.
    Started {
        /// The engine's rank.
        rank: u32,
        /// The number of the wave.
        wave: i64,
    },
    /// All engines have completed this wave and are idle.
    Complete {
        /// The number of the wave.
        wave: i64,
    },
}

impl Report {
    /// Decodes a message. Returns `None` if it has only statistics.
    ///
    /// # Errors
    /// The message is no `EngineCoreOutputs`.
    pub fn decode(frames: &[Bytes]) -> Result<Option<Self>, WireError> {
        let EngineMessage::Outputs(outputs) = output::decode(frames)? else { return Ok(None) };
        let complete = outputs.wave_complete.map(|wave| Self::Complete { wave });
        let rank = outputs.engine_index;
        Ok(complete.or_else(|| outputs.start_wave.map(|wave| Self::Started { rank, wave })))
    }
}

/// Encodes the message that starts a wave on all engines but the one that started it itself.
pub fn encode_start(wave: i64, started_by: Option<u32>) -> [Bytes; 2] {
    let mut to = Writer::default();
    to.array(2);
    wave.write(&mut to);
    started_by.write(&mut to);
    [Bytes::from_static(START), to.into_frames().swap_remove(0)]
}

/// Decodes the message that starts a wave, for an engine: the number of the wave, and the rank that
/// started it. Returns `None` for any other message.
pub fn decode_start(frames: &[Bytes]) -> Option<(i64, Option<u32>)> {
    let [kind, content] = frames else { return None };
    if kind != START {
        return None;
    }
    let mut from = Reader::new(std::slice::from_ref(content)).ok()?;
    if from.array().ok()? < 2 {
        return None;
    }
    Some((i64::read(&mut from).ok()?, Option::read(&mut from).ok()?))
}

/// Returns `true` for a subscription.
pub fn is_subscription(frames: &[Bytes]) -> bool {
    matches!(frames, [only] if only.first() == Some(&SUBSCRIBE))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(text: &str) -> Bytes {
        let byte = |index| u8::from_str_radix(&text[index..index + 2], 16).unwrap();
        (0..text.len()).step_by(2).map(byte).collect()
    }

    /// Messages of vLLM 0.33 and of its coordinator, recorded in a group of two.
    #[test]
    fn recorded_messages_are_decoded() {
        let decode = |text| Report::decode(&[hex(text)]).unwrap();
        assert_eq!(
            decode("990190c0cb40bacab8d1d3316bc0c0c000c0"),
            Some(Report::Started { rank: 1, wave: 0 })
        );
        assert_eq!(
            decode("990090c0cb40bacb3eada42813c0c000c0c0"),
            Some(Report::Complete { wave: 0 })
        );
        let start = [hex("02"), hex("920001")];
        assert_eq!(encode_start(0, Some(1)), start);
        assert_eq!(decode_start(&start), Some((0, Some(1))));
        assert!(is_subscription(&[hex("01")]));
    }

    #[test]
    fn other_messages_are_refused() {
        assert_eq!(Report::decode(&[Bytes::from_static(output::ENGINE_CORE_DEAD)]).unwrap(), None);
        assert!(Report::decode(&[hex("02")]).is_err());
        assert_eq!(decode_start(&[hex("02")]), None);
        assert_eq!(decode_start(&[hex("02"), hex("9100")]), None);
        assert_eq!(decode_start(&[hex("03"), hex("920001")]), None);
        assert_eq!(decode_start(&encode_start(1_795_802_785, None)), Some((1_795_802_785, None)));
        assert!(!is_subscription(&[hex("00")]));
    }
}
