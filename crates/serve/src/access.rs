//! Parts of an access check by tokens: who sends a request, with which token, and how a refusal is answered.

use std::net::{IpAddr, Ipv4Addr};

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};

use crate::table::group;

/// The address of a request's sender, as connections are counted by it. [`crate::serve`] adds it to each request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer(pub(crate) IpAddr);

impl Peer {
    pub(crate) fn of(address: IpAddr) -> Self {
        Self(group(address))
    }

    /// Returns the sender of a request. Requests without a connection have a common one.
    #[must_use]
    pub fn of_request(request: &Request) -> IpAddr {
        request.extensions().get::<Self>().map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |peer| peer.0)
    }
}

/// Returns the token of the header `Authorization: Bearer TOKEN`. Text that is not ASCII counts as an empty token.
#[must_use]
pub fn bearer_token(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().unwrap_or("Bearer ");
    let (scheme, token) = value.split_once(' ').unwrap_or((value, ""));
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim_matches(' '))
}

/// Returns the answer to a request that is refused for this reason.
#[must_use]
pub fn refusal(code: StatusCode, reason: &str) -> Response {
    let mut answer = (code, format!("{reason}\n")).into_response();
    if code == StatusCode::UNAUTHORIZED {
        answer.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_after_the_word_bearer() {
        let token = |value: &[u8]| {
            let headers =
                HeaderMap::from_iter([(header::AUTHORIZATION, HeaderValue::from_bytes(value).unwrap())]);
            bearer_token(&headers).map(str::to_owned)
        };
        assert_eq!(token(b"Bearer abc").as_deref(), Some("abc"));
        assert_eq!(token(b"bearer  abc ").as_deref(), Some("abc"));
        assert_eq!(token(b"Bearer").as_deref(), Some(""));
        assert_eq!(token(b"Bearer a\xff").as_deref(), Some(""));
        assert_eq!(token(b"Basic abc"), None);
        assert_eq!(bearer_token(&HeaderMap::new()), None);
    }
}
