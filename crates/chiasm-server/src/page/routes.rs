//! The page's paths. All but the files, which are the same for everybody, are for those alone who
//! have shown a key, if there are keys.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Extension, Path, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use http_body_util::{BodyExt, Limited};

use super::PageState;
use super::feed::Feed;
use crate::error::HttpError;
use crate::identity::Identity;
use crate::sse;

/// Bytes of a form with a key, and the time that it may take.
const FORM: usize = 8 << 10;
const FORM_TIMEOUT: Duration = Duration::from_secs(10);

const NO_KEY: &str = "a key is needed; the page at /ui/ asks for it";

const HTML: &str = "text/html; charset=utf-8";
const INDEX: &str = include_str!("web/index.html");
const LOGIN: &str = include_str!("web/login.html");
/// In the form, where a key was not taken.
const REFUSED: &str = "<p id=\"refused\" role=\"alert\">That is not one of this server's keys.</p>";
const REFUSED_HERE: &str = "<!-- refused -->";

/// The page's files, by their names.
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

/// Nothing but what this server itself sends, and nobody's frame.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; \
                      base-uri 'none'; frame-ancestors 'none'";
const RULES: [(HeaderName, &str); 5] = [
    (header::CONTENT_SECURITY_POLICY, POLICY),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::CACHE_CONTROL, "no-store"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
];

/// The page's routes.
pub(crate) fn router(state: Arc<PageState>) -> Router {
    Router::new()
        .route("/ui", get(async || to("ui/")))
        .route("/ui/", get(index))
        .route("/ui/login", post(login))
        .route("/ui/logout", post(logout))
        .route("/ui/events", get(events))
        .route("/ui/session", get(session))
        .route("/ui/requests/{number}", get(why))
        .route("/ui/{file}", get(file))
        .with_state(state)
}

async fn index(
    State(state): State<Arc<PageState>>,
    headers: HeaderMap,
) -> Result<Response, HttpError> {
    let is_admitted = state.admits(&headers);
    Ok(if is_admitted { ruled(HTML, INDEX.to_owned()) } else { form("") })
}

/// The form that asks for a key.
fn form(refused: &str) -> Response {
    let mut response = ruled(HTML, LOGIN.replace(REFUSED_HERE, refused));
    *response.status_mut() = StatusCode::UNAUTHORIZED;
    response
}

async fn login(
    State(state): State<Arc<PageState>>,
    request: Request,
) -> Result<Response, HttpError> {
    let body = Limited::new(request.into_body(), FORM).collect();
    let body = match tokio::time::timeout(FORM_TIMEOUT, body).await {
        Ok(Ok(body)) => body.to_bytes(),
        Ok(Err(_)) => {
            return Err(HttpError::large_body(format!("a form has no more than {FORM} bytes")));
        }
        Err(_) => return Err(HttpError::slow_body("the form did not arrive in time".to_owned())),
    };
    let key = form_urlencoded::parse(&body).find(|(name, _)| name == "key").map(|(_, key)| key);
    match key.and_then(|key| state.keys.current().digest(key.trim().as_bytes())) {
        Some(key) => Ok(with_cookie(to("./"), state.page.sessions.begin(key))),
        None => Ok(form(REFUSED)),
    }
}

async fn logout(
    State(state): State<Arc<PageState>>,
    headers: HeaderMap,
) -> Result<Response, HttpError> {
    Ok(with_cookie(to("./"), state.page.sessions.end(&headers)))
}

/// Tells a page that has lost its events whether its session still lasts.
async fn session(
    State(state): State<Arc<PageState>>,
    headers: HeaderMap,
) -> Result<Response, HttpError> {
    if !state.admits(&headers) {
        return Err(HttpError::unauthorized(NO_KEY));
    }
    Ok(with_rules(StatusCode::NO_CONTENT.into_response()))
}

async fn events(
    State(state): State<Arc<PageState>>,
    Extension(identity): Extension<Identity>,
    headers: HeaderMap,
) -> Result<Response, HttpError> {
    if !state.admits(&headers) {
        return Err(HttpError::unauthorized(NO_KEY));
    }
    let admitting = state.clone();
    let is_admitted = move || admitting.admits(&headers);
    let events = Feed::follow(state, is_admitted).ok_or_else(|| {
        HttpError::unavailable("pages_full", "enough pages are open, or the server is going down")
    })?;
    identity.connection.ends_with_client();
    Ok(with_rules(sse::response(events)))
}

async fn why(
    State(state): State<Arc<PageState>>,
    headers: HeaderMap,
    number: Result<Path<u64>, PathRejection>,
) -> Result<Response, HttpError> {
    if !state.admits(&headers) {
        return Err(HttpError::unauthorized(NO_KEY));
    }
    let Path(number) = number.map_err(|_| HttpError::no_such_path())?;
    let why = state.page.requests.why(number).ok_or_else(HttpError::no_such_path)?;
    Ok(with_rules(axum::Json(why).into_response()))
}

async fn file(name: Result<Path<String>, PathRejection>) -> Result<Response, HttpError> {
    let Path(name) = name.map_err(|_| HttpError::no_such_path())?;
    let (_, kind, text) =
        FILES.iter().find(|(file, ..)| *file == name).ok_or_else(HttpError::no_such_path)?;
    Ok(ruled(kind, (*text).to_owned()))
}

/// Sends the browser to a path beside the one that it asked for, whatever prefix a proxy gives
/// both.
fn to(path: &'static str) -> Response {
    let mut response = StatusCode::SEE_OTHER.into_response();
    response.headers_mut().insert(header::LOCATION, HeaderValue::from_static(path));
    with_rules(response)
}

fn ruled(kind: &'static str, text: String) -> Response {
    let mut response = Response::new(Body::from(text));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    with_rules(response)
}

fn with_rules(mut response: Response) -> Response {
    for (name, rule) in RULES {
        response.headers_mut().insert(name, HeaderValue::from_static(rule));
    }
    response
}

fn with_cookie(mut response: Response, cookie: Option<HeaderValue>) -> Response {
    if let Some(cookie) = cookie {
        response.headers_mut().insert(header::SET_COOKIE, cookie);
    }
    response
}
