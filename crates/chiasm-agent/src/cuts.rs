//! Conversion of videos' cuts to and from messages, and the choice of the videos that are cut.

use bytes::{Bytes, BytesMut};
use chiasm_backend::{CuttableVideo, MediaSource, PartFrame, VideoPart};
use chiasm_types::MmHash;

use crate::CHUNK_BYTES;
use crate::proto::{self, CutChunk};

/// The videos whose cuts an agent accepts for one of its engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AcceptedCuts {
    /// The number of usual videos that the agent decodes at once; 0 if it accepts no cuts.
    pub(crate) slots: u32,
    /// The maximum size of a video's cut and tensors together, in bytes.
    pub(crate) max_bytes: u64,
}

impl AcceptedCuts {
    /// Returns an item as a video, if its cut is sent in place of its tensors.
    pub(crate) fn cuttable<'a>(
        &self,
        source: &'a dyn MediaSource,
    ) -> Option<&'a dyn CuttableVideo> {
        let video = source.cuttable().filter(|_| self.slots > 0)?;
        (video.item_bytes() <= self.max_bytes).then_some(video)
    }
}

/// Returns the messages in which a video's cut is sent.
pub(crate) fn to_messages(
    hash: &MmHash,
    parts: Vec<VideoPart>,
) -> impl Iterator<Item = CutChunk> + Send + use<> {
    let first = CutChunk {
        mm_hash: Bytes::copy_from_slice(hash.as_bytes()),
        parts: parts.iter().map(part_to_message).collect(),
        bytes: Bytes::new(),
    };
    // Most pieces are much smaller than a message.
    let mut pieces = parts.into_iter().flat_map(|part| part.pieces);
    let mut rest = Bytes::new();
    let chunks = std::iter::from_fn(move || {
        let mut chunk = BytesMut::new();
        while chunk.len() < CHUNK_BYTES {
            if rest.is_empty() {
                let Some(piece) = pieces.next() else { break };
                rest = piece;
            }
            chunk.extend_from_slice(&rest.split_to(rest.len().min(CHUNK_BYTES - chunk.len())));
        }
        let bytes = chunk.freeze();
        (!bytes.is_empty()).then(|| CutChunk { bytes, ..CutChunk::default() })
    });
    [first].into_iter().chain(chunks)
}

fn part_to_message(part: &VideoPart) -> proto::CutPart {
    let VideoPart { pieces: _, samples, frames } = part;
    let (frames, positions) =
        frames.iter().map(|PartFrame { frame, position }| (frame, position)).unzip();
    proto::CutPart { length: part.bytes(), samples: *samples, frames, positions }
}

/// The announcement of a cut, whose bytes have not arrived yet.
#[derive(Debug)]
pub(crate) struct AnnouncedCut {
    /// The parts, and the length of each part's file.
    parts: Vec<(VideoPart, usize)>,
    /// The total size of all parts.
    pub(crate) bytes: u64,
}

impl AnnouncedCut {
    /// Parses the parts of a first message; `None` if they are malformed.
    pub(crate) fn from_message(parts: Vec<proto::CutPart>) -> Option<Self> {
        let bytes = parts.iter().try_fold(0_u64, |sum, part| sum.checked_add(part.length))?;
        let parts = parts.into_iter().map(part_from_message).collect::<Option<Vec<_>>>()?;
        (!parts.is_empty()).then_some(Self { parts, bytes })
    }

    /// Returns the parts with their bytes. `bytes` are those of all parts in order, as many as
    /// announced.
    pub(crate) fn into_parts(self, mut bytes: Bytes) -> Vec<VideoPart> {
        let fill = |(part, length): (VideoPart, usize)| {
            let pieces = vec![bytes.split_to(length.min(bytes.len()))];
            VideoPart { pieces, ..part }
        };
        self.parts.into_iter().map(fill).collect()
    }
}

/// Parses a part and the length of its file. `None` if it has no bytes or frames, or if the frames
/// are not among its samples in ascending order.
fn part_from_message(part: proto::CutPart) -> Option<(VideoPart, usize)> {
    let proto::CutPart { length, samples, frames, positions } = part;
    let has_positions = positions.is_sorted_by(|one, next| one < next)
        && positions.last().is_some_and(|last| *last < samples);
    if length == 0 || frames.len() != positions.len() || !has_positions {
        return None;
    }
    let frames = frames
        .into_iter()
        .zip(positions)
        .map(|(frame, position)| PartFrame { frame, position })
        .collect();
    let length = usize::try_from(length).ok()?;
    Some((VideoPart { pieces: Vec::new(), samples, frames }, length))
}

#[cfg(test)]
mod tests {
    use chiasm_backend::{EncodedItem, ItemField, SourceError, TensorRequest, VideoDescription};
    use futures_util::future::{BoxFuture, FutureExt};

    use super::*;

    /// Returns a cut with pieces of these sizes in each of its two parts.
    fn cut(sizes: &[usize]) -> Vec<VideoPart> {
        let part = |number: u64| {
            let piece = |size: &usize| Bytes::from(vec![(number + 7) as u8; *size]);
            let frame =
                |position: u32| PartFrame { frame: 100 * number + u64::from(position), position };
            VideoPart {
                pieces: sizes.iter().map(piece).collect(),
                samples: 9,
                frames: vec![frame(1), frame(8)],
            }
        };
        vec![part(0), part(1)]
    }

    fn content(part: &VideoPart) -> Vec<u8> {
        part.pieces.concat()
    }

    #[test]
    fn cut_survives_the_wire() {
        for sizes in [&[1, 2, 3][..], &[CHUNK_BYTES], &[0, CHUNK_BYTES + 1, 5, 2 * CHUNK_BYTES]] {
            let sent = cut(sizes);
            let mut messages = to_messages(&MmHash::new([9; 32]), sent.clone());
            let first = messages.next().unwrap();
            assert_eq!(*first.mm_hash, [9; 32]);
            let announced = AnnouncedCut::from_message(first.parts).unwrap();
            let chunks: Vec<Bytes> = messages.map(|message| message.bytes).collect();
            let (last, others) = chunks.split_last().unwrap();
            assert!(others.iter().all(|chunk| chunk.len() == CHUNK_BYTES));
            assert!((1..=CHUNK_BYTES).contains(&last.len()));
            let bytes = chunks.concat();
            assert_eq!(announced.bytes, bytes.len() as u64);
            let received = announced.into_parts(bytes.into());
            assert_eq!(received.len(), sent.len());
            for (received, sent) in received.iter().zip(&sent) {
                assert!(content(received) == content(sent));
                assert_eq!((received.samples, &received.frames), (sent.samples, &sent.frames));
            }
        }
    }

    /// A video whose cut and tensors take at most these bytes.
    struct Video(u64);

    impl MediaSource for Video {
        fn tensors(
            &self,
            _: TensorRequest,
        ) -> BoxFuture<'_, Result<Option<Vec<ItemField>>, SourceError>> {
            async { Ok(None) }.boxed()
        }

        fn encoded(&self) -> Option<EncodedItem> {
            None
        }

        fn cuttable(&self) -> Option<&dyn CuttableVideo> {
            Some(self)
        }
    }

    impl CuttableVideo for Video {
        fn description(&self) -> VideoDescription {
            panic!("it is not announced")
        }

        fn item_bytes(&self) -> u64 {
            self.0
        }

        fn cut(&self, _: u32) -> BoxFuture<'_, Result<Vec<VideoPart>, SourceError>> {
            panic!("it is not sent")
        }

        fn reject_cut(&self) {}
    }

    #[test]
    fn videos_are_cut_if_the_agent_accepts_their_size() {
        let is_cut = |slots, max_bytes, item_bytes| {
            AcceptedCuts { slots, max_bytes }.cuttable(&Video(item_bytes)).is_some()
        };
        assert!(is_cut(1, 100, 100));
        assert!(!is_cut(1, 100, 101));
        assert!(!is_cut(0, 100, 100));
    }

    #[test]
    fn malformed_announcements_are_refused() {
        let parts = to_messages(&MmHash::new([9; 32]), cut(&[3])).next().unwrap().parts;
        let is_accepted = |change: &dyn Fn(&mut proto::CutPart)| {
            let mut parts = parts.clone();
            change(&mut parts[1]);
            AnnouncedCut::from_message(parts).is_some()
        };
        assert!(is_accepted(&|_| {}));
        assert!(!is_accepted(&|part| part.length = 0));
        assert!(!is_accepted(&|part| part.length = u64::MAX));
        assert!(!is_accepted(&|part| part.samples = 8));
        assert!(!is_accepted(&|part| part.positions = vec![8, 1]));
        assert!(!is_accepted(&|part| part.positions = vec![1, 1]));
        assert!(!is_accepted(&|part| part.frames.truncate(1)));
        assert!(!is_accepted(&|part| {
            part.frames.clear();
            part.positions.clear();
        }));
        assert!(AnnouncedCut::from_message(Vec::new()).is_none());
    }
}
