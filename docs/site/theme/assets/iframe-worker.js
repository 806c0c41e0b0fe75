// Browsers refuse workers to pages that were opened from a folder (file://): there the search runs
// in a hidden frame that takes and gives the same messages.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.document.open();
      inside.document.write("<!doctype html><title>search</title>");
      inside.document.close();
      inside.postMessage = (data) => {
        this.dispatchEvent(new MessageEvent("message", { data }));
      };
      const script = inside.document.createElement("script");
      script.src = url;
      script.onload = () => {
        this.ready = true;
        this.waiting.splice(0).forEach((data) => this.postMessage(data));
      };
      inside.document.head.append(script);
    }
    postMessage(data) {
      if (!this.ready) {
        this.waiting.push(data);
        return;
      }
      const inside = this.frame.contentWindow;
      inside.dispatchEvent(new inside.MessageEvent("message", { data }));
    }
  };
}
