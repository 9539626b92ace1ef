// Browsers start no worker from file://: there a hidden frame runs the search.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      const give = (target, data) => target.dispatchEvent(new MessageEvent("message", { data }));
      const started = new Promise(resolve => { frame.onload = resolve; }).then(() => {
        frame.contentWindow.postMessage = data => give(this, data);
      });
      this.postMessage = data => started.then(() => give(frame.contentWindow, data));
      frame.hidden = true;
      frame.srcdoc = `<script src="${url}"></script>`;
      document.body.append(frame);
    }
  };
}
