//! Paths, and the APIs at them.

use chiasm_api::StreamApi;

pub(crate) const TOKENIZE: &str = "/tokenize";
pub(crate) const DETOKENIZE: &str = "/detokenize";
pub(crate) const LOAD_LORA: &str = "/v1/load_lora_adapter";
pub(crate) const UNLOAD_LORA: &str = "/v1/unload_lora_adapter";

/// The prefix of all paths of the live page.
pub const PAGE: &str = "/ui";

/// An endpoint whose requests are answered by a model, here or at a server to which they are
/// forwarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ModelEndpoint {
    /// OpenAI's chat completions.
    Chat,
    /// OpenAI's completions.
    Completions,
    /// OpenAI's responses.
    Responses,
    /// Anthropic's messages.
    Messages,
    /// Anthropic's count of a prompt's tokens.
    CountTokens,
}

impl ModelEndpoint {
    /// All endpoints.
    pub(crate) const ALL: [Self; 5] =
        [Self::Chat, Self::Completions, Self::Responses, Self::Messages, Self::CountTokens];

    /// Returns the endpoint at `path`, if there is one.
    pub(crate) fn at(path: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|endpoint| endpoint.path() == path)
    }

    /// Returns the path, with its leading slash.
    pub(crate) fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Responses => "/v1/responses",
            Self::Messages => "/v1/messages",
            Self::CountTokens => "/v1/messages/count_tokens",
        }
    }

    /// Returns the name in metrics and in the log.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completions => "completions",
            Self::Responses => "responses",
            Self::Messages => "messages",
            Self::CountTokens => "count_tokens",
        }
    }

    /// Returns the API of the endpoint's streams.
    pub(crate) fn stream_api(self) -> StreamApi {
        match self {
            Self::Chat | Self::Completions => StreamApi::Completions,
            Self::Responses => StreamApi::Responses,
            Self::Messages | Self::CountTokens => StreamApi::Messages,
        }
    }

    /// Returns `true` if the endpoint's errors have Anthropic's form, not OpenAI's.
    pub(crate) fn has_anthropic_errors(self) -> bool {
        match self {
            Self::Messages | Self::CountTokens => true,
            Self::Chat | Self::Completions | Self::Responses => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoint_is_found_only_at_its_path() {
        for endpoint in ModelEndpoint::ALL {
            assert_eq!(ModelEndpoint::at(endpoint.path()), Some(endpoint));
            assert_eq!(ModelEndpoint::at(&format!("{}/", endpoint.path())), None);
        }
        assert_eq!(ModelEndpoint::at(TOKENIZE), None);
    }
}
