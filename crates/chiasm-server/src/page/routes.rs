//! The page's routes. If there are API keys, all but the static files need a session or a key.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Extension, Path, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use http_body_util::{BodyExt, Limited};

use super::PageState;
use super::feed::Feed;
use crate::error::HttpError;
use crate::identity::Identity;
use crate::sse;

/// The maximum size of a login form, in bytes.
const MAX_FORM_BYTES: usize = 8 << 10;
/// The timeout for receiving a login form.
const FORM_TIMEOUT: Duration = Duration::from_secs(10);

const KEY_NEEDED: &str = "an API key is required; log in at /ui/";

const HTML: &str = "text/html; charset=utf-8";
const INDEX: &str = include_str!("web/index.html");
const LOGIN: &str = include_str!("web/login.html");
/// The message in the login form after a wrong key.
const REFUSED_MESSAGE: &str = "<p id=\"refused\" role=\"alert\">The API key is invalid.</p>";
/// The placeholder of [`REFUSED_MESSAGE`] in the form.
const REFUSED_PLACEHOLDER: &str = "<!-- refused -->";

/// The page's files: name, content type and content.
const FILES: [(&str, &str, &str); 8] = [
    ("icon.svg", "image/svg+xml", include_str!("web/icon.svg")),
    ("page.css", "text/css; charset=utf-8", include_str!("web/page.css")),
    ("page.js", JS, include_str!("web/page.js")),
    ("fleet.js", JS, include_str!("web/fleet.js")),
    ("requests.js", JS, include_str!("web/requests.js")),
    ("media.js", JS, include_str!("web/media.js")),
    ("time.js", JS, include_str!("web/time.js")),
    ("elements.js", JS, include_str!("web/elements.js")),
];
const JS: &str = "text/javascript; charset=utf-8";

/// The page loads nothing from other servers, and no other page may frame it.
const CONTENT_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
                              img-src 'self'; connect-src 'self'; form-action 'self'; \
                              base-uri 'none'; frame-ancestors 'none'";
const SECURITY_HEADERS: [(HeaderName, &str); 5] = [
    (header::CONTENT_SECURITY_POLICY, CONTENT_POLICY),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::CACHE_CONTROL, "no-store"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
];

/// Returns the page's routes.
pub(crate) fn router(state: Arc<PageState>) -> Router {
    Router::new()
        .route("/ui", get(async || redirect("ui/")))
        .route("/ui/", get(index))
        .route("/ui/login", post(login))
        .route("/ui/logout", post(logout))
        .route("/ui/events", get(events))
        .route("/ui/session", get(session))
        .route("/ui/requests/{number}", get(explanation))
        .route("/ui/{file}", get(file))
        .with_state(state)
}

async fn index(
    State(state): State<Arc<PageState>>,
    headers: HeaderMap,
) -> Result<Response, HttpError> {
    let is_admitted = state.admits(&headers);
    Ok(if is_admitted { text_response(HTML, INDEX.to_owned()) } else { login_form("") })
}

/// Returns the form that asks for a key, with a message.
fn login_form(message: &str) -> Response {
    let mut response = text_response(HTML, LOGIN.replace(REFUSED_PLACEHOLDER, message));
    *response.status_mut() = StatusCode::UNAUTHORIZED;
    response
}

async fn login(
    State(state): State<Arc<PageState>>,
    request: Request,
) -> Result<Response, HttpError> {
    let body = Limited::new(request.into_body(), MAX_FORM_BYTES).collect();
    let body = match tokio::time::timeout(FORM_TIMEOUT, body).await {
        Ok(Ok(body)) => body.to_bytes(),
        Ok(Err(_)) => {
            return Err(HttpError::large_body(format!(
                "the form has more than {MAX_FORM_BYTES} bytes"
            )));
        }
        Err(_) => return Err(HttpError::slow_body("the form did not arrive in time".to_owned())),
    };
    let key = form_urlencoded::parse(&body).find(|(name, _)| name == "key").map(|(_, key)| key);
    match key.and_then(|key| state.keys.current().digest(key.trim().as_bytes())) {
        Some(key) => Ok(with_cookie(redirect("./"), state.page.sessions.begin(key))),
        None => Ok(login_form(REFUSED_MESSAGE)),
    }
}

async fn logout(
    State(state): State<Arc<PageState>>,
    headers: HeaderMap,
) -> Result<Response, HttpError> {
    Ok(with_cookie(redirect("./"), state.page.sessions.end(&headers)))
}

/// Returns 204 if a session is still valid, for pages whose event stream has ended.
async fn session(
    State(state): State<Arc<PageState>>,
    headers: HeaderMap,
) -> Result<Response, HttpError> {
    if !state.admits(&headers) {
        return Err(HttpError::unauthorized(KEY_NEEDED));
    }
    Ok(with_security_headers(StatusCode::NO_CONTENT.into_response()))
}

async fn events(
    State(state): State<Arc<PageState>>,
    Extension(identity): Extension<Identity>,
    headers: HeaderMap,
) -> Result<Response, HttpError> {
    if !state.admits(&headers) {
        return Err(HttpError::unauthorized(KEY_NEEDED));
    }
    let page_state = state.clone();
    let is_admitted = move || page_state.admits(&headers);
    let events = Feed::follow(state, is_admitted).ok_or_else(|| {
        HttpError::unavailable(
            "pages_full",
            "too many pages are open, or the server is shutting down",
        )
    })?;
    identity.connection.cancel_on_disconnect();
    Ok(with_security_headers(sse::response(events)))
}

async fn explanation(
    State(state): State<Arc<PageState>>,
    headers: HeaderMap,
    uri: Uri,
    number: Result<Path<u64>, PathRejection>,
) -> Result<Response, HttpError> {
    if !state.admits(&headers) {
        return Err(HttpError::unauthorized(KEY_NEEDED));
    }
    let no_such_path = || HttpError::no_such_path(uri.path());
    let Path(number) = number.map_err(|_| no_such_path())?;
    let explanation = state.page.requests.explain(number).ok_or_else(no_such_path)?;
    Ok(with_security_headers(axum::Json(explanation).into_response()))
}

async fn file(uri: Uri, name: Result<Path<String>, PathRejection>) -> Result<Response, HttpError> {
    let no_such_path = || HttpError::no_such_path(uri.path());
    let Path(name) = name.map_err(|_| no_such_path())?;
    let (_, kind, text) = FILES.iter().find(|(file, ..)| *file == name).ok_or_else(no_such_path)?;
    Ok(text_response(kind, (*text).to_owned()))
}

/// Redirects to a path relative to the requested one, which works with any prefix that a proxy
/// adds.
fn redirect(path: &'static str) -> Response {
    let mut response = StatusCode::SEE_OTHER.into_response();
    response.headers_mut().insert(header::LOCATION, HeaderValue::from_static(path));
    with_security_headers(response)
}

fn text_response(kind: &'static str, text: String) -> Response {
    let mut response = Response::new(Body::from(text));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    with_security_headers(response)
}

fn with_security_headers(mut response: Response) -> Response {
    for (name, value) in SECURITY_HEADERS {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

fn with_cookie(mut response: Response, cookie: Option<HeaderValue>) -> Response {
    if let Some(cookie) = cookie {
        response.headers_mut().insert(header::SET_COOKIE, cookie);
    }
    response
}
