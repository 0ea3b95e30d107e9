//! Who may see the page: whoever has shown one of the keys lately.
//!
//! Browsers can't send a key along with a page or a stream of events, and one in a URL would end in logs. So a form takes the key once,
//! and the browser gets a cookie, which says until when it counts and proves that this process has made it. Nothing is kept here.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::http::{HeaderMap, HeaderValue, header};

/// The cookie's name.
const NAME: &str = "chiasm_ui";
/// How long a session lasts.
const LASTS: Duration = Duration::from_secs(12 * 3600);

/// Makes and knows the cookies of this process.
pub(super) struct Sessions {
    secret: [u8; blake3::KEY_LEN],
    secure: bool,
}

impl Sessions {
    /// Cookies that only HTTPS may carry if `secure`.
    pub(super) fn new(secure: bool) -> Self {
        Self { secret: rand::random(), secure }
    }

    /// The header that begins a session.
    pub(super) fn begin(&self) -> Option<HeaderValue> {
        let until = now() + LASTS.as_secs();
        self.set_cookie(&format!("{until}.{}", self.proof(until)), LASTS)
    }

    /// The header that ends whatever session there is.
    pub(super) fn end(&self) -> Option<HeaderValue> {
        self.set_cookie("", Duration::ZERO)
    }

    /// Whether a request comes from a session.
    pub(super) fn has(&self, headers: &HeaderMap) -> bool {
        self.has_at(headers, now())
    }

    fn has_at(&self, headers: &HeaderMap, now: u64) -> bool {
        let cookies = headers.get_all(header::COOKIE).iter().filter_map(|cookies| cookies.to_str().ok());
        let mut pairs =
            cookies.flat_map(|cookies| cookies.split(';')).filter_map(|cookie| cookie.trim().split_once('='));
        pairs.any(|(name, value)| name == NAME && self.is_valid(value, now))
    }

    fn is_valid(&self, value: &str, now: u64) -> bool {
        let Some((until, proof)) = value.split_once('.') else { return false };
        let Ok(until) = until.parse::<u64>() else { return false };
        // Compared in constant time.
        blake3::Hash::from_hex(proof).is_ok_and(|proof| proof == self.proof(until)) && now < until
    }

    fn proof(&self, until: u64) -> blake3::Hash {
        blake3::keyed_hash(&self.secret, &until.to_le_bytes())
    }

    /// Without a path the cookie is for the paths beside that of the form, whatever prefix a proxy gives them.
    fn set_cookie(&self, value: &str, lasts: Duration) -> Option<HeaderValue> {
        let secure = if self.secure { "; Secure" } else { "" };
        let cookie = format!("{NAME}={value}; Max-Age={}; HttpOnly; SameSite=Strict{secure}", lasts.as_secs());
        HeaderValue::from_str(&cookie).ok()
    }
}

/// Seconds since the epoch.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(cookies: &str) -> HeaderMap {
        HeaderMap::from_iter([(header::COOKIE, cookies.parse().unwrap())])
    }

    fn cookie(set: HeaderValue) -> String {
        set.to_str().unwrap().split(';').next().unwrap().to_owned()
    }

    #[test]
    fn a_session_is_known_among_other_cookies_until_it_ends() {
        let sessions = Sessions::new(false);
        let cookie = cookie(sessions.begin().unwrap());
        assert!(sessions.has(&headers(&format!("a=b; {cookie}; c"))));
        assert!(!sessions.has_at(&headers(&cookie), now() + LASTS.as_secs()));
        assert!(!Sessions::new(false).has(&headers(&cookie)), "another process's");
        assert!(!sessions.has(&HeaderMap::new()));
    }

    #[test]
    fn what_was_changed_is_no_session() {
        let sessions = Sessions::new(false);
        let cookie = cookie(sessions.begin().unwrap());
        let (until, proof) = cookie.strip_prefix("chiasm_ui=").unwrap().split_once('.').unwrap();
        let later = until.parse::<u64>().unwrap() + 1;
        for value in
            [format!("{later}.{proof}"), format!("{until}."), until.to_owned(), format!("{until}.{}", "0".repeat(64))]
        {
            assert!(!sessions.has(&headers(&format!("chiasm_ui={value}"))), "{value}");
        }
    }

    #[test]
    fn scripts_and_other_sites_do_not_get_the_cookie() {
        let set = Sessions::new(true).begin().unwrap();
        let set = set.to_str().unwrap();
        assert!(["; HttpOnly", "; SameSite=Strict", "; Secure"].iter().all(|rule| set.contains(rule)), "{set}");
        let end = Sessions::new(false).end().unwrap();
        assert_eq!(end, "chiasm_ui=; Max-Age=0; HttpOnly; SameSite=Strict");
    }
}
