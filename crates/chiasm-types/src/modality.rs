use std::fmt;
use std::sync::Arc;

/// What kind of thing a media item is.
///
/// The names of the first three are those of vLLM's modalities; a model's own processor may bring
/// others, such as `vision_chunk`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Modality {
    /// A still image.
    Image,
    /// A video clip.
    Video,
    /// A sound recording.
    Audio,
    /// A modality that only the model's own processor knows, by the name that it has in vLLM.
    Other(Arc<str>),
}

impl Modality {
    /// The name in vLLM's messages, in metrics and in flags.
    pub fn name(&self) -> &str {
        match self {
            Self::Image => "image",
            Self::Video => "video",
            Self::Audio => "audio",
            Self::Other(name) => name,
        }
    }

    /// The modality of that name; one that is not known to Chiasm becomes [`Modality::Other`].
    pub fn from_name(name: &str) -> Self {
        match name {
            "image" => Self::Image,
            "video" => Self::Video,
            "audio" => Self::Audio,
            other => Self::Other(other.into()),
        }
    }
}

impl fmt::Display for Modality {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_modalities_belong_together() {
        for modality in [
            Modality::Image,
            Modality::Video,
            Modality::Audio,
            Modality::Other("vision_chunk".into()),
        ] {
            assert_eq!(Modality::from_name(modality.name()), modality);
        }
    }
}
