use axum::body::Body;

use super::*;

fn these(names: &[&str]) -> Allowed {
    Allowed::new(names.iter().map(|name| (*name).to_owned()).collect())
}

fn cors(origins: &[&str], methods: &[&str], headers: &[&str], allows_credentials: bool) -> Cors {
    Cors::new(these(origins), these(methods), these(headers), allows_credentials).unwrap()
}

fn request(method: &str, headers: &[(&str, &str)]) -> Request {
    let builder = Request::builder().method(method).uri("/v1/models");
    let builder =
        headers.iter().fold(builder, |builder, (name, value)| builder.header(*name, *value));
    builder.body(Body::empty()).unwrap()
}

/// What a browser is told when it asks: the status, and the headers by their names without
/// `access-control-`.
fn preflight(cors: &Cors, origin: &str, method: &str, headers: Option<&str>) -> (u16, Vec<String>) {
    let mut asked = vec![("origin", origin), ("access-control-request-method", method)];
    asked.extend(headers.map(|headers| ("access-control-request-headers", headers)));
    let mut answer = cors.preflight(&request("OPTIONS", &asked)).unwrap();
    cors.tell(Some(&origin.parse().unwrap()), answer.headers_mut());
    (answer.status().as_u16(), told(answer.headers()))
}

fn told(headers: &HeaderMap) -> Vec<String> {
    let told = headers.iter().filter_map(|(name, value)| {
        let name = name.as_str().strip_prefix("access-control-")?;
        Some(format!("{name}: {}", value.to_str().unwrap()))
    });
    let mut told: Vec<_> = told.collect();
    told.sort();
    told
}

/// What stands at an answer to a page of this origin.
fn simple(cors: &Cors, origin: Option<&str>) -> Vec<String> {
    let mut headers = HeaderMap::new();
    cors.tell(origin.map(|origin| origin.parse().unwrap()).as_ref(), &mut headers);
    assert_eq!(headers[VARY], "origin");
    told(&headers)
}

#[test]
fn all_may_ask_where_all_are_allowed() {
    let all = cors(&["*"], &["*"], &["*"], false);
    let expected = [
        "allow-methods: DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT",
        "allow-origin: *",
        "max-age: 600",
    ];
    assert_eq!(
        preflight(&all, "https://a.example", "POST", None),
        (200, expected.map(str::to_owned).to_vec())
    );
    let (status, told) = preflight(&all, "null", "PATCH", Some("Authorization, x-a"));
    assert_eq!((status, told[0].as_str()), (200, "allow-headers: Authorization, x-a"));
    assert_eq!(simple(&all, Some("https://a.example")), ["allow-origin: *"]);
    assert_eq!(simple(&all, None), [""; 0]);
    // With credentials each is told its own name.
    let all = cors(&["*"], &["*"], &["*"], true);
    let expected = ["allow-credentials: true", "allow-origin: https://a.example"];
    assert_eq!(simple(&all, Some("https://a.example")), expected);
    let (status, told) = preflight(&all, "https://a.example", "POST", None);
    assert_eq!(
        (status, &told[0], &told[2]),
        (200, &expected[0].to_owned(), &expected[1].to_owned())
    );
}

#[test]
fn some_may_ask_for_what_they_are_allowed() {
    let some =
        cors(&["https://a.example", "http://localhost:3000"], &["POST"], &["Authorization"], false);
    for origin in ["https://a.example", "http://localhost:3000"] {
        let (status, told) = preflight(&some, origin, "POST", Some("content-type,AUTHORIZATION"));
        let headers =
            "allow-headers: authorization, accept, accept-language, content-language, content-type";
        let expected =
            [headers, "allow-methods: POST", &format!("allow-origin: {origin}"), "max-age: 600"];
        assert_eq!((status, told), (200, expected.map(str::to_owned).to_vec()));
        assert_eq!(simple(&some, Some(origin)), [format!("allow-origin: {origin}")]);
    }
    for wrong in [
        "https://b.example",
        "https://a.example:8443",
        "http://a.example",
        "https://A.example",
        "null",
    ] {
        assert_eq!(preflight(&some, wrong, "POST", None), (400, vec![]), "{wrong}");
        assert_eq!(simple(&some, Some(wrong)), [""; 0], "{wrong}");
    }
    // It may read why not.
    let refused = (400, vec!["allow-origin: https://a.example".to_owned()]);
    assert_eq!(preflight(&some, "https://a.example", "GET", None), refused);
    assert_eq!(preflight(&some, "https://a.example", "POST", Some("authorization, x-a")), refused);
}

#[test]
fn only_questions_of_browsers_are_answered() {
    let all = cors(&["*"], &["*"], &["*"], false);
    let (origin, method) =
        (("origin", "https://a.example"), ("access-control-request-method", "POST"));
    for (sent, headers) in [
        ("OPTIONS", &[][..]),
        ("OPTIONS", &[origin]),
        ("OPTIONS", &[method]),
        ("POST", &[origin, method]),
    ] {
        assert!(all.preflight(&request(sent, headers)).is_none(), "{sent} {headers:?}");
    }
}

#[test]
fn what_no_browser_says_is_refused() {
    let new = |origin: &str, method: &str, header: &str| {
        Cors::new(these(&[origin]), these(&[method]), these(&[header]), false).map(drop)
    };
    for fine in ["https://a.example", "http://[::1]:8080", "chrome-extension://abc", "null", "*"] {
        assert_eq!(new(fine, "*", "*"), Ok(()), "{fine}");
    }
    let all = [
        "a.example",
        "https://",
        "://a",
        "https://a.example/",
        "https://A.example",
        "https://a.example:443",
    ];
    for wrong in all.into_iter().chain([
        "http://a.example:80",
        "https://*.example",
        "https://a b",
        "",
        "https://ä.example",
    ]) {
        assert_eq!(new(wrong, "*", "*"), Err(CorsError::Origin(wrong.to_owned())));
    }
    assert_eq!(new("*", "PO ST", "*"), Err(CorsError::Method("PO ST".to_owned())));
    assert_eq!(new("*", "*", "x: y"), Err(CorsError::Header("x: y".to_owned())));
}
