//! A small HTTP client that keeps one connection and reconnects when the server has closed it.

use http_body_util::{BodyExt as _, Full};
use hyper::body::Bytes;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::{Request, Uri};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

/// A client of one server.
#[derive(Debug)]
pub struct HttpClient {
    host: String,
    connection: Option<SendRequest<Full<Bytes>>>,
}

/// Reasons why a request got no answer.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// The address is not of the form `http://host:port`.
    #[error("{0:?} is not an address; write one such as http://127.0.0.1:12345")]
    Address(String),
    /// The server does not accept connections.
    #[error("cannot connect to {host}")]
    Connect {
        /// Host and port of the server.
        host: String,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The request is malformed.
    #[error("cannot build the request")]
    Request(#[from] hyper::http::Error),
    /// The connection broke before the answer was complete.
    #[error("the connection broke")]
    Broken(#[from] hyper::Error),
}

impl HttpClient {
    /// Creates a client for `http://host:port`. It connects with the first request.
    pub fn new(url: &str) -> Result<Self, HttpError> {
        let address = || HttpError::Address(url.to_owned());
        let uri: Uri = url.parse().map_err(|_| address())?;
        let host = uri.authority().filter(|host| host.port().is_some()).ok_or_else(address)?.to_string();
        Ok(Self { host, connection: None })
    }

    /// Sends a request and returns status and body of the answer.
    pub async fn send(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Result<(u16, String), HttpError> {
        let mut request = Request::builder().method(method).uri(path).header("host", &self.host);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(body.into()))?;
        let mut connection = self.connect().await?;
        let answer = connection.send_request(request).await?;
        let code = answer.status().as_u16();
        let body = answer.into_body().collect().await?.to_bytes();
        self.connection = Some(connection);
        Ok((code, String::from_utf8_lossy(&body).into_owned()))
    }

    async fn connect(&mut self) -> Result<SendRequest<Full<Bytes>>, HttpError> {
        if let Some(mut kept) = self.connection.take()
            && kept.ready().await.is_ok()
        {
            return Ok(kept);
        }
        let no = |source| HttpError::Connect { host: self.host.clone(), source };
        let stream = TcpStream::connect(&self.host).await.map_err(no)?;
        stream.set_nodelay(true).map_err(no)?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await?;
        tokio::spawn(async move {
            // The connection ends with its sender or with the server. The next request notices.
            let _ = connection.await;
        });
        Ok(sender)
    }
}
