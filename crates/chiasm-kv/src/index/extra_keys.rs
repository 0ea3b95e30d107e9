//! The interpretation of extra keys: media items, LoRA name and salt of a stored block.

use chiasm_types::MmHash;

use crate::event::ExtraKey;
use crate::identifier::LastItem;

/// A reader of the extra keys of consecutive blocks.
#[derive(Default)]
pub(super) struct ExtraKeyReader {
    /// The media items of the last block, each with its offset.
    pub(super) media: Vec<(MmHash, i64)>,
    last: LastItem,
}

impl ExtraKeyReader {
    /// Reads the extra keys of one block into `media` and returns the salt.
    ///
    /// The wire does not tag extra keys, so their order determines their meaning: the LoRA name if
    /// the event has one, media items, the salt in the `first` block of a prompt. Returns `None` if
    /// a key does not fit this order.
    pub(super) fn read<'a>(
        &mut self,
        extra_keys: &'a [ExtraKey],
        lora: Option<&str>,
        first: bool,
    ) -> Option<Option<&'a str>> {
        let mut rest = match (extra_keys.split_first(), lora) {
            (Some((ExtraKey::Text(first), rest)), Some(lora)) if first == lora => rest,
            _ => extra_keys,
        };
        self.media.clear();
        while let [ExtraKey::Media { identifier, offset }, after @ ..] = rest {
            self.media.push((self.last.identity(identifier), *offset));
            rest = after;
        }
        let mut salt = None;
        if let ([ExtraKey::Text(text), after @ ..], true) = (rest, first) {
            salt = Some(text.as_str());
            rest = after;
        }
        rest.is_empty().then_some(salt)
    }
}
