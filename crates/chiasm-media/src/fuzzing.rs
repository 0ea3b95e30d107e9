//! Internals for the targets in `fuzz/`. Built only with the feature `fuzzing`.

use bytes::Bytes;
use url::Url;

use crate::policy::UrlPolicy;
use crate::{ByteBudget, MediaConfig, MediaError, data_uri};

/// Decodes a `data:` URL. Returns `None` for other URLs.
pub fn decode_data_url(
    url: &str,
    max_bytes: u64,
    budget: &ByteBudget,
) -> Option<Result<Bytes, MediaError>> {
    Some(data_uri::decode(data_uri::content(url.as_bytes())?, max_bytes, budget))
}

/// Parses a URL and returns it if the policy allows to fetch it.
pub fn allowed_url(config: &MediaConfig, url: &str) -> Result<Url, MediaError> {
    let url =
        Url::parse(url).map_err(|_| MediaError::InvalidUrl { reason: "it cannot be parsed" })?;
    UrlPolicy::new(config, UrlPolicy::address_rule(config)).check(&url).map(|()| url)
}

/// Returns the target of a redirect from an allowed URL, if the policy allows it.
pub fn allowed_redirect(
    config: &MediaConfig,
    from: &Url,
    location: &[u8],
) -> Result<Url, MediaError> {
    let target = crate::fetch::redirect_target(from, location)?;
    UrlPolicy::new(config, UrlPolicy::address_rule(config))
        .check_redirect(from, &target)
        .map(|()| target)
}
