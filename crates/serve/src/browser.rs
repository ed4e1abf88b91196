//! Protects pages from other web sites: a browser that can reach a server, for example through a port-forward, also
//! sends it the requests of any page that it shows.
//!
//! The functions decide by headers that a page cannot change: `Host` and `Origin`.

use axum::http::{HeaderMap, Method, Uri, header, uri::Authority};

/// The reason why a request is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ForeignRequest {
    /// The host name may lead here by the choice of another site (DNS rebinding).
    #[error(
        "this server is not known as {0:?}; call it by its IP address or add the name with --dashboard-host"
    )]
    Host(String),
    /// The request comes from a page of another site.
    #[error("requests of pages from {0:?} are not answered")]
    Origin(String),
    /// The method changes something, and no page may do so.
    #[error("the method {0} is not served here")]
    Method(Method),
}

/// Checks a request for a page. `names` are the host names of the server; IP addresses and `localhost` need not be
/// listed, because no other site can choose where they lead.
pub fn check_page(
    method: &Method,
    uri: &Uri,
    headers: &HeaderMap,
    names: &[String],
) -> Result<(), ForeignRequest> {
    if !matches!(*method, Method::GET | Method::HEAD | Method::POST) {
        return Err(ForeignRequest::Method(method.clone()));
    }
    let hosts = headers.get_all(header::HOST).iter().map(|host| host.to_str().unwrap_or("?").to_owned());
    let hosts: Vec<String> = hosts.chain(uri.authority().map(|named| named.to_string())).collect();
    for host in &hosts {
        if !host.parse::<Authority>().is_ok_and(|host| is_own(host.host(), names)) {
            return Err(ForeignRequest::Host(host.clone()));
        }
    }
    match origin(headers) {
        // Only the pages of this server have its host as their origin.
        Some(origin) if !hosts.iter().any(|host| is_origin_of(&origin, host)) => {
            Err(ForeignRequest::Origin(origin))
        }
        _ => Ok(()),
    }
}

/// Checks a request for a verb. Only programs call verbs, and only browsers send an origin.
pub fn check_call(headers: &HeaderMap) -> Result<(), ForeignRequest> {
    origin(headers).map_or(Ok(()), |origin| Err(ForeignRequest::Origin(origin)))
}

fn origin(headers: &HeaderMap) -> Option<String> {
    headers.get(header::ORIGIN).map(|origin| origin.to_str().unwrap_or("?").to_owned())
}

fn is_own(host: &str, names: &[String]) -> bool {
    let address = host.trim_start_matches('[').trim_end_matches(']');
    let name = host.trim_end_matches('.');
    address.parse::<std::net::IpAddr>().is_ok()
        || name.eq_ignore_ascii_case("localhost")
        || names.iter().any(|own| own.eq_ignore_ascii_case(name))
}

fn is_origin_of(origin: &str, host: &str) -> bool {
    let named = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
    named.is_some_and(|named| named.eq_ignore_ascii_case(host))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(host: &str, origin: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in [(header::HOST, host), (header::ORIGIN, origin)] {
            if !value.is_empty() {
                headers.insert(name, value.parse().unwrap());
            }
        }
        headers
    }

    fn checked(method: Method, host: &str, origin: &str) -> Result<(), ForeignRequest> {
        let names = ["tessera-scheduler.kube-system.svc".to_owned()];
        check_page(&method, &Uri::from_static("/"), &headers(host, origin), &names)
    }

    #[test]
    fn own_names_and_addresses_are_served() {
        for host in [
            "127.0.0.1:12346",
            "[::1]:12346",
            "localhost:8080",
            "10.0.0.7",
            "tessera-scheduler.kube-system.svc:12346",
            "",
        ] {
            assert_eq!(checked(Method::GET, host, ""), Ok(()), "{host}");
        }
        assert_eq!(checked(Method::POST, "127.0.0.1:12346", "http://127.0.0.1:12346"), Ok(()));
    }

    #[test]
    fn names_that_others_choose_are_rejected() {
        for host in ["evil.example:12346", "127.0.0.1.evil.example", "localhost.evil.example", "a b"] {
            assert!(matches!(checked(Method::GET, host, ""), Err(ForeignRequest::Host(_))), "{host}");
        }
        let uri = Uri::from_static("http://evil.example/");
        assert!(check_page(&Method::GET, &uri, &HeaderMap::new(), &[]).is_err());
    }

    #[test]
    fn pages_of_other_sites_get_no_answer() {
        for origin in ["http://evil.example", "null", "http://127.0.0.1:9999", "http://127.0.0.1"] {
            let answer = checked(Method::POST, "127.0.0.1:12346", origin);
            assert_eq!(answer, Err(ForeignRequest::Origin(origin.to_owned())));
        }
        assert!(check_call(&headers("10.0.0.7:12345", "http://10.0.0.7:12345")).is_err());
        assert_eq!(check_call(&headers("10.0.0.7:12345", "")), Ok(()));
    }

    #[test]
    fn only_reading_methods_are_served() {
        assert_eq!(checked(Method::DELETE, "localhost", ""), Err(ForeignRequest::Method(Method::DELETE)));
    }
}
