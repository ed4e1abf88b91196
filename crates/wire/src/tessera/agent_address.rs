//! Where the agent of a node serves its pages, and how clients know that they reach it. The agent publishes both in
//! annotations of its node.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use crate::foreign::objects::Node;

/// Node annotation with the URL of the pages, such as `https://10.0.0.5:5678`. If it is absent, clients use plain HTTP,
/// the node's internal address and [`DEFAULT_PORT`].
pub const URL_KEY: &str = "tessera.dev/agent";

/// Node annotation with the fingerprint of the agent's certificate. It is absent or empty if the pages are open.
pub const CERTIFICATE_KEY: &str = "tessera.dev/agent-certificate";

/// Node annotation by which an agent announces that it does not serve pods, because it stops or has not registered with
/// the kubelet yet. Its value is the [identity](AgentAddress::identity) of that agent, so it is void once another agent has
/// published its address, also an agent of a release that does not know the annotation. Empty while the agent serves.
pub const UNAVAILABLE_KEY: &str = "tessera.dev/agent-unavailable";

/// Audience of tokens for the pages of agents. Such a token is of no use at the API server.
pub const AUDIENCE: &str = "tessera.dev/agent";

/// Default port of the agent.
pub const DEFAULT_PORT: u16 = 5678;

/// Address of an agent's pages.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AgentAddress {
    /// URL of the pages.
    pub url: String,
    /// Fingerprint of the agent's certificate, or its unreadable text. Without one the pages are open.
    pub certificate: Option<Result<Fingerprint, BadFingerprint>>,
}

/// SHA-256 hash of a certificate, written as `sha256:` and 64 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub [u8; 32]);

/// A text is not a fingerprint.
#[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[error("{0:?} is not the fingerprint of a certificate, which is sha256: and 64 hexadecimal digits")]
pub struct BadFingerprint(String);

impl AgentAddress {
    /// Returns the address of a node's agent from the node's annotations or its internal address.
    #[must_use]
    pub fn of(node: &Node) -> Option<Self> {
        let annotation = |key: &str| node.metadata.annotations.get(key).filter(|text| !text.is_empty());
        if let Some(url) = annotation(URL_KEY) {
            let certificate = annotation(CERTIFICATE_KEY).map(|text| text.parse());
            return Some(Self { url: url.clone(), certificate });
        }
        let internal = node.status.addresses.iter().find(|address| address.kind == "InternalIP")?;
        let url = match internal.address.parse() {
            Ok(IpAddr::V6(address)) => format!("http://[{address}]:{DEFAULT_PORT}"),
            _ => format!("http://{}:{DEFAULT_PORT}", internal.address),
        };
        Some(Self { url, certificate: None })
    }
}

impl AgentAddress {
    /// Returns the text by which one run of an agent is known: its certificate, which each run makes anew, or the URL of
    /// open pages.
    #[must_use]
    pub fn identity(&self) -> String {
        let certificate = self.certificate.as_ref().and_then(|certificate| certificate.as_ref().ok());
        certificate.map_or_else(|| self.url.clone(), ToString::to_string)
    }
}

/// Returns whether the agent that published its address on a node has announced that it does not serve pods.
#[must_use]
pub fn is_agent_unavailable(node: &Node) -> bool {
    let annotation = |key: &str| node.metadata.annotations.get(key).filter(|text| !text.is_empty());
    let current = annotation(CERTIFICATE_KEY).or_else(|| annotation(URL_KEY));
    current.is_some() && annotation(UNAVAILABLE_KEY) == current
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:")?;
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for Fingerprint {
    type Err = BadFingerprint;

    fn from_str(text: &str) -> Result<Self, BadFingerprint> {
        let bad = || BadFingerprint(text.chars().take(100).collect());
        let digits = text.strip_prefix("sha256:").filter(|digits| digits.len() == 64).ok_or_else(bad)?;
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(digits.as_bytes().chunks(2)) {
            let pair = std::str::from_utf8(pair).ok().filter(|pair| !pair.starts_with('+'));
            *byte = pair.and_then(|pair| u8::from_str_radix(pair, 16).ok()).ok_or_else(bad)?;
        }
        Ok(Self(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(node: &str) -> Option<AgentAddress> {
        AgentAddress::of(&serde_json::from_str(node).expect("a node"))
    }

    #[test]
    fn an_agent_is_found_by_annotation_or_by_the_internal_address() {
        let url = |node: &str| address(node).map(|address| address.url);
        let at = |ip: &str| {
            format!(
                r#"{{"status":{{"addresses":[{{"type":"Hostname","address":"n"}},{{"type":"InternalIP","address":"{ip}"}}]}}}}"#
            )
        };
        assert_eq!(url("{}"), None);
        let named = r#"{"metadata":{"annotations":{"tessera.dev/agent":"http://a:1"}}}"#;
        assert_eq!(url(named).as_deref(), Some("http://a:1"));
        assert_eq!(url(&at("10.0.0.5")).as_deref(), Some("http://10.0.0.5:5678"));
        assert_eq!(url(&at("fd00::5")).as_deref(), Some("http://[fd00::5]:5678"));
    }

    #[test]
    fn an_agent_is_unavailable_only_by_its_own_announcement() {
        let check = |url: &str, certificate: &str, announced: &str| {
            let annotations = [(URL_KEY, url), (CERTIFICATE_KEY, certificate), (UNAVAILABLE_KEY, announced)];
            let mut node = Node::default();
            node.metadata.annotations =
                annotations.map(|(key, text)| (key.to_owned(), text.to_owned())).into();
            is_agent_unavailable(&node)
        };
        let fingerprint = Fingerprint([7; 32]);
        let address = AgentAddress { url: "https://a:1".into(), certificate: Some(Ok(fingerprint)) };
        assert!(check("https://a:1", &fingerprint.to_string(), &address.identity()));
        assert!(!check("https://a:1", &fingerprint.to_string(), ""), "it serves");
        assert!(
            !check("https://a:1", &Fingerprint([8; 32]).to_string(), &address.identity()),
            "another agent"
        );
        let open = AgentAddress { url: "http://a:1".into(), certificate: None };
        assert!(check("http://a:1", "", &open.identity()));
        assert!(!check("http://b:1", "", &open.identity()), "another agent");
        assert!(!check("", "", ""), "no agent has ever run");
        assert!(!is_agent_unavailable(&Node::default()));
    }

    #[test]
    fn a_certificate_is_known_by_its_fingerprint() {
        let of = |certificate: &str| {
            let node = format!(
                r#"{{"metadata":{{"annotations":{{"tessera.dev/agent":"https://a:1","tessera.dev/agent-certificate":"{certificate}"}}}}}}"#
            );
            address(&node).expect("an address").certificate
        };
        let fingerprint = Fingerprint(std::array::from_fn(|at| u8::try_from(at * 8).expect("at most 248")));
        assert_eq!(of(&fingerprint.to_string()), Some(Ok(fingerprint)));
        assert_eq!(of(""), None, "an agent with open pages");
        let long = "ä".repeat(1000);
        for text in
            ["sha256:00", "md5:00", &fingerprint.to_string().replace("00", "+0"), &"é".repeat(36), &long]
        {
            assert!(matches!(of(text), Some(Err(_))), "{text}");
        }
    }
}
