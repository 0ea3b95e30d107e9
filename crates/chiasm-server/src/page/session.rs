//! The sessions of browsers that have shown one of the keys.
//!
//! Browsers can't send a key along with a page or a stream of events, and a key in a URL would end
//! up in logs. So a form takes the key once, and the browser gets a random cookie. A session ends
//! after [`LIFETIME`], by a logout, or when its key is removed from the server's keys.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use axum::http::{HeaderMap, HeaderValue, header};
use tokio::time::Instant;

use super::lock;

/// The cookie's name.
const COOKIE_NAME: &str = "chiasm_ui";
/// The maximum lifetime of a session.
const LIFETIME: Duration = Duration::from_secs(12 * 3600);
/// The maximum number of sessions. One more ends the oldest.
const MAX_SESSIONS: usize = 1000;

/// The sessions of this process.
pub(super) struct Sessions {
    secure: bool,
    /// The live sessions, by the digests of their cookies' values.
    live: Mutex<HashMap<blake3::Hash, Session>>,
}

struct Session {
    began: Instant,
    /// The digest of the session's key.
    key: blake3::Hash,
}

impl Sessions {
    /// Creates an empty table. If `secure`, browsers send the cookies over HTTPS only.
    pub(super) fn new(secure: bool) -> Self {
        Self { secure, live: Mutex::default() }
    }

    /// Begins a session for a browser that has sent this key. Returns the header that sets its
    /// cookie.
    pub(super) fn begin(&self, key: blake3::Hash) -> Option<HeaderValue> {
        let value = blake3::Hash::from_bytes(rand::random()).to_hex();
        let mut live = lock(&self.live);
        live.retain(|_, session| session.is_current());
        if live.len() >= MAX_SESSIONS {
            let oldest =
                live.iter().min_by_key(|(_, session)| session.began).map(|(digest, _)| *digest);
            oldest.and_then(|digest| live.remove(&digest));
        }
        live.insert(blake3::hash(value.as_bytes()), Session { began: Instant::now(), key });
        self.set_cookie(&value, LIFETIME)
    }

    /// Ends the session of a request. Returns the header that removes its cookie.
    pub(super) fn end(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        let mut live = lock(&self.live);
        digests(headers).for_each(|digest| {
            live.remove(&digest);
        });
        self.set_cookie("", Duration::ZERO)
    }

    /// Returns `true` if a request belongs to a session whose key still satisfies `is_key`.
    pub(super) fn has(&self, headers: &HeaderMap, is_key: impl Fn(&blake3::Hash) -> bool) -> bool {
        let live = lock(&self.live);
        digests(headers)
            .filter_map(|digest| live.get(&digest))
            .any(|session| session.is_current() && is_key(&session.key))
    }

    /// Returns the header that sets the cookie.
    ///
    /// The cookie has no path, so browsers send it to paths in the form's folder, with any prefix
    /// that a proxy adds.
    fn set_cookie(&self, value: &str, lifetime: Duration) -> Option<HeaderValue> {
        let secure = if self.secure { "; Secure" } else { "" };
        let seconds = lifetime.as_secs();
        let cookie =
            format!("{COOKIE_NAME}={value}; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}");
        HeaderValue::from_str(&cookie).ok()
    }
}

impl Session {
    fn is_current(&self) -> bool {
        self.began.elapsed() < LIFETIME
    }
}

/// Returns the digests of a request's session cookies. Lookups compare digests, so timing reveals
/// nothing about the values.
fn digests(headers: &HeaderMap) -> impl Iterator<Item = blake3::Hash> {
    let cookies =
        headers.get_all(header::COOKIE).iter().filter_map(|cookies| cookies.to_str().ok());
    let pairs = cookies
        .flat_map(|cookies| cookies.split(';'))
        .filter_map(|cookie| cookie.trim().split_once('='));
    pairs.filter(|(name, _)| *name == COOKIE_NAME).map(|(_, value)| blake3::hash(value.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(cookies: &str) -> HeaderMap {
        HeaderMap::from_iter([(header::COOKIE, cookies.parse().unwrap())])
    }

    fn key() -> blake3::Hash {
        blake3::hash(b"secret")
    }

    fn begin(sessions: &Sessions) -> String {
        let set = sessions.begin(key()).unwrap();
        set.to_str().unwrap().split(';').next().unwrap().to_owned()
    }

    fn has(sessions: &Sessions, cookies: &str) -> bool {
        sessions.has(&headers(cookies), |shown| *shown == key())
    }

    #[tokio::test(start_paused = true)]
    async fn session_is_found_among_cookies_until_it_expires() {
        let sessions = Sessions::new(false);
        let cookie = begin(&sessions);
        assert!(has(&sessions, &format!("a=b; {cookie}; c")));
        assert!(!has(&Sessions::new(false), &cookie), "the cookie of another process");
        assert!(!sessions.has(&HeaderMap::new(), |_| true));
        tokio::time::advance(LIFETIME).await;
        assert!(!has(&sessions, &cookie));
        begin(&sessions);
        assert_eq!(lock(&sessions.live).len(), 1, "the expired session is removed");
    }

    #[test]
    fn modified_cookie_is_no_session() {
        let sessions = Sessions::new(false);
        let cookie = begin(&sessions);
        for value in
            [format!("{cookie}0"), cookie[..cookie.len() - 1].to_owned(), "chiasm_ui=".to_owned()]
        {
            assert!(!has(&sessions, &value), "{value}");
        }
    }

    #[test]
    fn logout_ends_only_its_session() {
        let sessions = Sessions::new(false);
        let cookies = [begin(&sessions), begin(&sessions)];
        let removed = sessions.end(&headers(&cookies[0])).unwrap();
        assert_eq!(removed, "chiasm_ui=; Max-Age=0; HttpOnly; SameSite=Strict");
        assert!(!has(&sessions, &cookies[0]), "even if the cookie was kept");
        assert!(has(&sessions, &cookies[1]));
    }

    #[test]
    fn session_ends_with_its_key() {
        let sessions = Sessions::new(false);
        let cookie = begin(&sessions);
        assert!(!sessions.has(&headers(&cookie), |shown| *shown == blake3::hash(b"new")));
    }

    #[tokio::test(start_paused = true)]
    async fn session_over_the_limit_ends_the_oldest() {
        let sessions = Sessions::new(false);
        let oldest = begin(&sessions);
        tokio::time::advance(Duration::from_secs(1)).await;
        let newer: Vec<_> = (0..MAX_SESSIONS).map(|_| begin(&sessions)).collect();
        assert!(!has(&sessions, &oldest));
        assert!(newer.iter().all(|cookie| has(&sessions, cookie)));
    }

    #[test]
    fn cookie_has_strict_attributes() {
        let set = Sessions::new(true).begin(key()).unwrap();
        let set = set.to_str().unwrap();
        assert!(
            ["; HttpOnly", "; SameSite=Strict", "; Secure"].iter().all(|rule| set.contains(rule)),
            "{set}"
        );
    }
}
