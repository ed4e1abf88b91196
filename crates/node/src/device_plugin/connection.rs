//! A connection from the kubelet whose requests the HTTP/2 server accepts.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use tessera_wire::kubelet::AuthorityFilter;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::UnixStream,
};
use tonic::transport::server::Connected;

/// Bytes read from the socket at a time.
const CHUNK_BYTES: usize = 8192;

/// A stream that replaces the authority of all requests by `localhost`.
#[derive(Debug)]
pub(super) struct Connection {
    stream: UnixStream,
    filter: AuthorityFilter,
    /// Filtered bytes that the server has not read yet.
    filtered: io::Cursor<Vec<u8>>,
}

impl Connection {
    pub(super) fn new(stream: UnixStream) -> Self {
        Self { stream, filter: AuthorityFilter::default(), filtered: io::Cursor::default() }
    }
}

impl Connected for Connection {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for Connection {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Self { stream, filter, filtered } = self.get_mut();
        let before = buffer.filled().len();
        loop {
            ready!(Pin::new(&mut *filtered).poll_read(context, buffer))?;
            if buffer.filled().len() > before || buffer.remaining() == 0 {
                return Poll::Ready(Ok(()));
            }
            let mut chunk = [0; CHUNK_BYTES];
            let mut chunk = ReadBuf::new(&mut chunk);
            ready!(Pin::new(&mut *stream).poll_read(context, &mut chunk))?;
            if chunk.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
            let passed = filter.push(chunk.filled()).map_err(io::Error::other)?;
            *filtered = io::Cursor::new(passed);
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
